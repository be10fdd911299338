"""Fixtures of the packages for databases: MiniLM with Matryoshka cuts forced on, and a few passages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond import Engine
from millpond.ingest import Record

__all__ = ["engine", "minilm", "records"]

TEXTS = [
    "The mill pond feeds the water wheel through a wooden sluice.",
    "A zip archive is a container of compressed files.",
    "Bread rises because yeast turns sugar into carbon dioxide.",
    "Sockets connect two processes over a network.",
    "The heart pumps blood through arteries and veins.",
    "A binary search halves the interval at every step.",
    "Glaciers carve valleys as they slide downhill.",
    "The violin has four strings tuned in fifths.",
    "Garbage collection frees memory that nothing refers to.",
    "Tides follow the moon.",
    "A regular expression describes a set of strings.",
    "Copper conducts electricity better than iron.",
]


@pytest.fixture(scope="session")
def minilm(minilm_folder: Path) -> str:
    """The folder of all-MiniLM-L6-v2."""
    return str(minilm_folder)


@pytest.fixture(scope="session")
def engine(minilm: str) -> Iterator[Engine]:
    """MiniLM was not trained for Matryoshka; forcing it is enough for tests."""
    with Engine(minilm, dtype="float32", device="cpu", hf_overrides={"is_matryoshka": True}) as engine:
        yield engine


@pytest.fixture(scope="session")
def records() -> list[Record]:
    """A dozen passages on different subjects."""
    return [
        Record(f"doc-{n}", text, {"n": n, "lang": "en", "tags": ["a", "b"][: n % 3]}) for n, text in enumerate(TEXTS)
    ]
