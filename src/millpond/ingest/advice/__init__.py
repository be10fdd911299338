"""Advice on how to store a collection's vectors, from its own texts and queries."""
