"""Requests: what every route reads of a body, and how it calls an engine."""
