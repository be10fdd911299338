"""Engines over tiny checkpoints, made once per session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.tiny import write_checkpoint

from millpond.engine.engine import Engine


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's plain checkpoint."""
    root = tmp_path_factory.mktemp("plain")

    def folder(family: str) -> Path:
        place = root / family
        return place if place.exists() else write_checkpoint(place, family)

    return folder


@pytest.fixture(scope="session")
def engine_of(plain: Callable[[str], Path]) -> Iterator[Callable[..., Engine]]:
    """A family's engine in float32 on the CPU, with any other option."""
    engines: dict[tuple[Any, ...], Engine] = {}

    def engine(family: str, **options: Any) -> Engine:
        key = (family, *sorted(options.items()))
        if key not in engines:
            engines[key] = Engine(plain(family), **{"dtype": "float32", "device": "cpu"} | options)
        return engines[key]

    yield engine
    for made in engines.values():
        made.close()
