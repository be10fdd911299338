"""A real model, without prompts and with a prompt for each role, and tiny rerankers and sparse models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.adapters import write_prompted, write_prompted_splade
from tests.passages import TEXTS
from tests.passages import minilm as minilm
from tests.tiny.heads import write_cross_encoder, write_m3

from millpond import Engine

Checkpoints = Callable[..., Path]
Engines = Callable[..., Engine]


@pytest.fixture(scope="session")
def prompted(checkpoint_of: Checkpoints, minilm: str) -> str:
    """MiniLM with a prompt for each role."""
    return str(checkpoint_of(write_prompted, minilm))


@pytest.fixture(scope="session")
def cross_encoder(checkpoint_of: Checkpoints) -> str:
    """A tiny cross-encoder, whose scores are logits."""
    return str(checkpoint_of(write_cross_encoder))


@pytest.fixture(scope="session")
def prompted_splade(checkpoint_of: Checkpoints) -> str:
    return str(checkpoint_of(write_prompted_splade))


@pytest.fixture(scope="session")
def m3(checkpoint_of: Checkpoints) -> str:
    """A tiny BGE-M3, which gives dense and sparse vectors."""
    return str(checkpoint_of(write_m3))


@pytest.fixture(scope="session")
def engine(engine_of: Engines) -> Engine:
    """MiniLM, in an engine that adapters do not share."""
    return engine_of("minilm")


@pytest.fixture(scope="session")
def prompted_engine(engine_of: Engines, prompted: str) -> Engine:
    return engine_of(Path(prompted))


@pytest.fixture(scope="session")
def cross_encoder_engine(engine_of: Engines, cross_encoder: str) -> Engine:
    return engine_of(Path(cross_encoder))


@pytest.fixture(scope="session")
def splade_engine(engine_of: Engines, prompted_splade: str) -> Engine:
    return engine_of(Path(prompted_splade))


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return TEXTS
