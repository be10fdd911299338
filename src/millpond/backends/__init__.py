"""Backends: what computes a model. The engine knows them by :mod:`millpond.backends.backend` only."""
