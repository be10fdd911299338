"""The files of an index on disk."""
