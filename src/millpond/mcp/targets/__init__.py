"""Targets: what the server searches."""
