"""The page at ``/``."""
