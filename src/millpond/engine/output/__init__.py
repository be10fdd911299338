"""Output: rows of a finished call assembled into what its caller gets."""
