"""PlaidIndex: the contract of every index, with each payload, before and after centroids are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.late_interaction.index_contract import IndexContract

from millpond import Engine
from millpond.late_interaction import LateInteractionIndex, PlaidIndex


class TestPlaidIndex(IndexContract):
    """Rows in int8, as long as there are few of them."""

    def open(self, path: Path, engine: Engine | None, **options: Any) -> LateInteractionIndex:
        return PlaidIndex(path, engine, **options)
