"""QdrantIndex: the contract of every index, in memory and in a folder, and what only an index in Qdrant has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from qdrant_client import QdrantClient
from tests.late_interaction.index_contract import IndexContract

from millpond import Engine
from millpond.late_interaction import LateInteractionIndex
from millpond_qdrant import QdrantIndex


class TestFolder(IndexContract):
    """In a folder, with candidates by MUVERA."""

    score_error = 1e-3  # a test adds float16
    atomic = False
    rounds = 8

    def open(self, path: Path, engine: Engine | None, **options: Any) -> LateInteractionIndex:
        return QdrantIndex(path, "docs", engine, **options)


class TestMemory(IndexContract):
    """In a client that outlives the index, with candidates by mean vectors."""

    score_error = 1e-3  # a test adds float16
    atomic = False
    rounds = 8

    @pytest.fixture(autouse=True)
    def client(self) -> Iterator[QdrantClient]:
        client = QdrantClient(":memory:", force_disable_check_same_thread=True)
        self.clients: dict[Path, QdrantClient] = {}
        yield client
        client.close()

    def open(self, path: Path, engine: Engine | None, **options: Any) -> LateInteractionIndex:
        client = self.clients.setdefault(path, QdrantClient(":memory:"))
        return QdrantIndex(client, "docs", engine, prefetch="dense", **options)
