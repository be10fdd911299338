"""Served: the models and the indexes of a server."""
