"""Output: rows of a finished call, assembled into the caller's output."""
