"""Real text, a real model, and a reranker of random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.tiny.heads import write_cross_encoder

from millpond import Engine
from millpond.cli.demo.stdlib_docs import read_stdlib
from millpond.ingest import Record

SEARCHED = frozenset("calendar ftplib glob itertools random shutil statistics zipfile".split())


@pytest.fixture(scope="session")
def minilm(minilm_folder: Path) -> str:
    return str(minilm_folder)


@pytest.fixture(scope="session")
def engine(minilm: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """It computes the vectors of the records once for all databases."""
    settings = {"cache": tmp_path_factory.mktemp("chains") / "vectors.cache", "max_length": 96}
    with Engine(minilm, dtype="float32", device="cpu", hf_overrides={"is_matryoshka": True}, **settings) as engine:
        yield engine


@pytest.fixture(scope="session")
def records() -> list[Record]:
    """The documentation of a few modules of the standard library, of this Python."""
    return [record for record in read_stdlib() if record.id.split(".")[0] in SEARCHED]


@pytest.fixture(scope="session")
def reranker(engine_of: Callable[..., Engine]) -> Engine:
    """Whatever it prefers, the chain must hand that on."""
    return engine_of(write_cross_encoder)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the databases are."""
    return tmp_path_factory.mktemp("databases")
