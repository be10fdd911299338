"""``millpond demo``: search the documentation of the standard library, through the public API."""
