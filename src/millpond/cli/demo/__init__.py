"""``millpond demo``: search the documentation of the standard library, one file per part."""
