"""Retrieved nodes and a recorder of events, beside the models of all adapters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import llama_index.core.instrumentation as instrument
import pytest
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.schema import NodeWithScore, TextNode
from pydantic import Field
from tests.adapter_models import (
    cross_encoder as cross_encoder,
)
from tests.adapter_models import (
    cross_encoder_engine as cross_encoder_engine,
)
from tests.adapter_models import (
    engine as engine,
)
from tests.adapter_models import (
    m3 as m3,
)
from tests.adapter_models import (
    minilm as minilm,
)
from tests.adapter_models import (
    prompted as prompted,
)
from tests.adapter_models import (
    prompted_engine as prompted_engine,
)
from tests.adapter_models import (
    prompted_splade as prompted_splade,
)
from tests.adapter_models import (
    splade_engine as splade_engine,
)
from tests.adapter_models import (
    texts as texts,
)


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
