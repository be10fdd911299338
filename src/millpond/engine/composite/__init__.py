"""Composite: results that take more than one call."""
