"""Pooler = method + head: token rows to one row, and what follows."""
