"""Telemetry: metrics, throughput, timings, tracing and access logs."""
