"""A real model, without prompts and with a prompt for each role, and tiny rerankers and sparse models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_index.core.instrumentation as instrument
import pytest
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.schema import NodeWithScore, TextNode
from pydantic import Field
from tests.adapters import write_prompted, write_prompted_splade
from tests.passages import TEXTS
from tests.tiny.heads import write_cross_encoder, write_m3

from millpond import Engine

Checkpoints = Callable[..., Path]
Engines = Callable[..., Engine]


@pytest.fixture(scope="session")
def minilm(minilm_folder: Path) -> str:
    return str(minilm_folder)


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


@pytest.fixture
def hits(texts: list[str]) -> list[NodeWithScore]:
    """Retrieved nodes."""
    return [
        NodeWithScore(node=TextNode(id_=f"id-{i}", text=text, metadata={"n": i}), score=1 - i / 20)
        for i, text in enumerate(texts)
    ]


class Recorder(BaseEventHandler):
    """Records every event."""

    events: list[Any] = Field(default_factory=list)

    def handle(self, event: Any, **_: Any) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    dispatcher = instrument.get_dispatcher()  # type: ignore[attr-defined]
    recorder = Recorder()
    before = list(dispatcher.event_handlers)
    dispatcher.add_event_handler(recorder)
    yield recorder
    dispatcher.event_handlers = before
