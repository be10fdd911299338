"""The fixtures of all packages for databases."""

from tests.passages import engine, minilm, records

__all__ = ["engine", "minilm", "records"]
