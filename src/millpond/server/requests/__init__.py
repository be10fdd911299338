"""Requests: from a request body to an engine call."""
