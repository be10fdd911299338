"""Admission: what may be under way at once, and what happens at shutdown."""
