"""The fixtures of all packages for databases; without Chroma nothing of this folder is collected."""

from importlib.util import find_spec

from tests.passages import engine, minilm, records

__all__ = ["engine", "minilm", "records"]

collect_ignore_glob = [] if find_spec("chromadb") else ["test_*.py"]
