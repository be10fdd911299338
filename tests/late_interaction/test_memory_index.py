"""MemoryIndex: the contract of every index, and what only an index in memory has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.late_interaction.index_contract import IndexContract

from millpond import Engine
from millpond.late_interaction import LateInteractionIndex, MemoryIndex


class TestMemoryIndex(IndexContract):
    """In int8, stored by ``save``."""

    def open(self, path: Path, engine: Engine | None, **options: Any) -> LateInteractionIndex:
        return MemoryIndex.open(path, engine, **options) if path.exists() else MemoryIndex(engine, **options)

    def reopen(
        self, index: LateInteractionIndex, path: Path, engine: Engine | None, **options: Any
    ) -> LateInteractionIndex:
        assert isinstance(index, MemoryIndex)
        index.save(path)
        index.close()
        return MemoryIndex.open(path, engine, **options)
