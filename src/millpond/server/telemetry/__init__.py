"""Telemetry: metrics, timings, tracing, and the log."""
