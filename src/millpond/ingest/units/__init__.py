"""Units: the parts of a file that a search finds, with their lines."""
