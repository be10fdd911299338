"""Audit: which model and settings made the vectors of a collection, and which rows are not by it."""
