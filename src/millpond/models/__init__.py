"""A checkpoint's description, turned into a network that runs packed rows."""
