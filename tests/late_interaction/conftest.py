"""Small numbers in place of large ones: centroids are trained, and rows compared by their codes, from few rows on."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def train_from(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Train the first centroids of a PlaidIndex at so many rows."""
    return lambda rows: monkeypatch.setattr("millpond.late_interaction.plaid.compaction.TRAIN_TOKENS", rows)
