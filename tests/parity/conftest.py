"""Engines with tiny checkpoints, created once per session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.tiny import Layout, write_checkpoint

from millpond.engine.engine import Engine


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's plain checkpoint."""
    root = tmp_path_factory.mktemp("plain")

    def folder(family: str) -> Path:
        path = root / family
        return path if path.exists() else write_checkpoint(path, family)

    return folder


@pytest.fixture(scope="session")
def engine_of(plain: Callable[[str], Path]) -> Iterator[Callable[..., Engine]]:
    """A family's engine, by default in float32 on the CPU; one engine for each set of options."""
    engines: dict[tuple[Any, ...], Engine] = {}

    def engine(family: str, **options: Any) -> Engine:
        key = (family, *sorted(options.items()))
        if key not in engines:
            engines[key] = Engine(plain(family), **{"dtype": "float32", "device": "cpu"} | options)
        return engines[key]

    yield engine
    for created in engines.values():
        created.close()


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[..., tuple[Engine, Any]]]:
    """Write a checkpoint and load it twice: (millpond's engine, sentence-transformers' model)."""
    reference = pytest.importorskip("sentence_transformers").SentenceTransformer
    with ExitStack() as stack:

        def load(
            layout: Layout | None, family: str = "bert", *, change: Any = None, **options: Any
        ) -> tuple[Engine, Any]:
            engine_options = {
                key: options.pop(key) for key in ("hf_overrides", "pooling", "normalize") if key in options
            }
            folder = write_checkpoint(tmp_path / "model", family, sentence_transformers=layout, **options)
            if change is not None:
                change(folder)
            engine = stack.enter_context(Engine(folder, dtype="float32", device="cpu", **engine_options))
            return engine, reference(str(folder), device="cpu", local_files_only=True)

        yield load
