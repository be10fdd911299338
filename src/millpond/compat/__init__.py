"""Interfaces of other projects, implemented on the engine."""
