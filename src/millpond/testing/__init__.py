"""Contracts that the tests of a sink, an index or an adapter of your own derive from; they need pytest."""
