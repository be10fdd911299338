"""Sources: what a path, an iterable or a table holds, read as records."""
