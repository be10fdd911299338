"""A folder of files: what of it is read, its index in the cache folder, and the search of it."""
