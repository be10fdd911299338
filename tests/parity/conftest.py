"""Engines with tiny checkpoints, beside the models of sentence-transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.tiny import Layout, write_checkpoint

from millpond import Engine


@pytest.fixture(scope="session")
def plain(checkpoint_of: Callable[..., Path]) -> Callable[[str], Path]:
    """The folder of a family's plain checkpoint."""
    return checkpoint_of


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
