"""A collection that is kept equal to a folder, a file or a table."""
