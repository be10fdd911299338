"""The server of these tests, which all share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from integrations.milvus.tests.server.running import RunningMilvus, running_milvus


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMilvus]:
    """A Milvus 2.3.5, started by the first test that asks for it."""
    with running_milvus(tmp_path_factory.mktemp("milvus")) as running:
        yield running
