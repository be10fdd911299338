"""Checkpoints of the variants."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.native.models import ADAPTED, VARIANTS
from tests.tiny import write_checkpoint


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a variant's checkpoint."""
    root = tmp_path_factory.mktemp("variants")

    def folder(variant: str) -> Path:
        family, config = ("jina", ADAPTED[variant]) if variant in ADAPTED else VARIANTS[variant]
        place = root / variant
        return place if place.exists() else write_checkpoint(place, family, config=config)

    return folder
