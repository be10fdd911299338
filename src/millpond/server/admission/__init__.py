"""Admission: limits on what may be in flight at once, and shutdown."""
