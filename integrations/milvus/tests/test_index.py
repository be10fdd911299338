"""MilvusIndex: the contract of every index, in Milvus Lite, and what only an index in Milvus has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.late_interaction.index_contract import IndexContract

from millpond import Engine
from millpond.late_interaction import LateInteractionIndex
from millpond_milvus import MilvusIndex


class TestLite(IndexContract):
    """In a file of Milvus Lite, with candidates by MUVERA."""

    atomic = False
    rounds = 5

    def open(self, path: Path, engine: Engine | None, **options: Any) -> LateInteractionIndex:
        return MilvusIndex(path.with_suffix(".db"), "docs", engine, **options)
