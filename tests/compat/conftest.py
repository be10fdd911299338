"""Stand-ins for checkpoints of the hub, written once, and vLLM's class over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.tiny.hub import STAND_INS

from millpond import LLM


@pytest.fixture(scope="session")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder that stands in for a hub id."""
    root = tmp_path_factory.mktemp("hub")

    def hub(name: str) -> Path:
        folder = root / name
        return folder if folder.exists() else STAND_INS[name](folder)

    return hub


@pytest.fixture(scope="session")
def load(hub: Callable[[str], Path]) -> Iterator[Callable[..., LLM]]:
    """An LLM in float32 on the CPU, loaded once for equal arguments."""
    loaded: dict[str, LLM] = {}

    def load(name: str, **options: Any) -> LLM:
        key = repr((name, sorted(options.items())))
        if key not in loaded:
            loaded[key] = LLM(hub(name), **{"dtype": "float32", "device": "cpu"} | options)
        return loaded[key]

    yield load
    for llm in loaded.values():
        llm.close()
