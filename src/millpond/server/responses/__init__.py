"""Responses: bodies as JSON and as binary, and the fields around their data."""
