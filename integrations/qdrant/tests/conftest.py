"""The fixtures of all packages for databases, and a server."""

from collections.abc import Iterator

import pytest
from integrations.qdrant.tests.fake_qdrant import FakeQdrant, serving
from tests.passages import engine, minilm, records

__all__ = ["engine", "minilm", "records", "server"]


@pytest.fixture
def server() -> Iterator[FakeQdrant]:
    with serving() as fake:
        yield fake
