"""The cache of vectors: a SQLite file."""
