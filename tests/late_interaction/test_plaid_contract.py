"""PlaidIndex: the contract of every index, with int8 rows and with centroid codes in each codec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.late_interaction.index_contract import IndexContract

from millpond import Engine
from millpond.late_interaction import LateInteractionIndex, PlaidIndex


class TestPlaidIndex(IndexContract):
    """Rows in int8, as long as there are few of them."""

    rounds = 5

    def open(self, path: Path, engine: Engine | None, **options: Any) -> LateInteractionIndex:
        return PlaidIndex(path, engine, **options)


class Trained(IndexContract):
    """Centroids are trained on the first rows, however few."""

    codec: Any

    @pytest.fixture(autouse=True)
    def trains_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("millpond.late_interaction.plaid.compaction.TRAIN_TOKENS", 1)

    def open(self, path: Path, engine: Engine | None, **options: Any) -> LateInteractionIndex:
        return PlaidIndex(path, engine, self.codec, **options)


@pytest.mark.contract
class TestCodesAndFourBits(Trained):
    """The default after training."""

    codec = "4"
    score_error = 0.08


@pytest.mark.slow
class TestCodesAndTwoBits(Trained):
    """The smallest codec."""

    codec = "2"
    score_error = 0.3


@pytest.mark.slow
class TestCodesAndInt8Rows(Trained):
    """The exact codec."""

    codec = "int8"
