"""What the adapters of LangChain and of LlamaIndex have in common: checkpoints, texts, and calls in an event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.gates import LoopGate, batches_held, batches_through, loading_through, until_set
from tests.tiny import edit_json
from tests.tiny.heads import write_splade

from millpond import Engine
from millpond.errors import InputTooLongError, InvalidRequestError
from millpond.testing import AdapterContract

QUESTION = "What makes dough rise?"
PROMPTS = {"query": "search_query: ", "document": "search_document: "}
# Renders an instruction, or else a word.
TEMPLATE = (
    "{{ instruction or 'wheel' }} "
    "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }} "
    "{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}"
)


def write_prompted(folder: Path, source: str) -> Path:
    """The checkpoint of another folder, with a prompt for each role."""
    folder.mkdir()
    for entry in Path(source).iterdir():
        if entry.name != "config_sentence_transformers.json":
            (folder / entry.name).symlink_to(entry)
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
    return folder


def write_prompted_splade(folder: Path) -> Path:
    """A tiny SPLADE checkpoint with a prompt for each role."""
    write_splade(folder)
    edit_json(folder / "config_sentence_transformers.json", prompts={"query": "ask: ", "document": "passage: "})
    return folder


def many(count: int) -> list[str]:
    return [f"the {i}th passage, about {i * i} things" for i in range(count)]


def dense(vectors: Sequence[dict[int, float]]) -> list[list[float]]:
    """Sparse vectors of a tiny vocabulary as rows."""
    return [[vector.get(token, 0.0) for token in range(512)] for vector in vectors]


class CallContract(AdapterContract):
    """An adapter whose methods take texts: in an event loop, and with texts that are none."""

    def call(self, adapter: Any, texts: Any) -> Any:
        """One result for each text."""
        raise NotImplementedError

    async def acall(self, adapter: Any, texts: Any) -> Any:
        raise NotImplementedError

    async def test_async_neither_blocks_the_loop_nor_takes_a_thread(
        self, engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: object) -> None:
            raise AssertionError("the adapter took a thread of the loop's pool")

        async def blocks() -> Any:
            return self.call(adapter, many(40))

        monkeypatch.setattr(asyncio.get_running_loop(), "run_in_executor", refuse)
        adapter = self.build(engine=engine)
        for call, gate in ((self.acall(adapter, many(40)), LoopGate()), (blocks(), LoopGate(seconds=0.2))):
            with batches_through(gate, engine):
                assert len(await gate.run(call)) == 40
            assert gate.calls
            assert gate.blocked is (call.__name__ == "blocks")  # the gate detects a blocked loop

    async def test_the_loop_goes_on_while_a_model_loads(self, model: str) -> None:
        adapter = self.build(**{self.named: model, "max_batch_tokens": 1111})  # an engine that no other test shares
        gate = LoopGate()
        with loading_through(gate):
            await gate.run(self.acall(adapter, ["tides"]))
        assert gate.calls == ["load"] and not gate.blocked
        adapter._engine().close()

    async def test_a_cancelled_call_leaves_the_engine_working(self, engine: Engine) -> None:
        adapter = self.build(engine=engine)
        with batches_held(engine) as due:
            call = asyncio.ensure_future(self.acall(adapter, many(1000)))
            await until_set(due)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        self.assert_same(await self.aask(adapter), self.expected(engine))

    async def test_bad_texts_are_named_and_none_are_no_error(self, engine: Engine) -> None:
        adapter = self.build(engine=engine)
        for texts, message in ((["a", None], "index 1 is a NoneType"), (["a", "\ud800"], "index 1 holds a lone surr")):
            with pytest.raises(InvalidRequestError, match=message):
                self.call(adapter, texts)
            with pytest.raises(InvalidRequestError, match=message):
                await self.acall(adapter, texts)
        with pytest.raises(TypeError, match="not a str"):
            self.call(adapter, "one text")
        assert list(self.call(adapter, [])) == list(await self.acall(adapter, [])) == []

    def test_a_long_text_is_cut_or_refused_as_told(self, model: str) -> None:
        options = {self.named: model, "dtype": "float32", "max_length": 12}
        long = "wheel " * 30 + "pond"
        end, head, start = (
            np.ravel(self.plain(self.call(self.build(**options, truncate=side), [text])))
            for side, text in (("end", long), ("end", "wheel " * 30), ("start", long))
        )
        np.testing.assert_array_equal(end, head)
        assert not np.array_equal(end, start)
        with pytest.raises(InputTooLongError, match="max_length=12"):
            self.call(self.build(**options, truncate="error"), ["short", long])

    def plain(self, results: Any) -> Any:
        """The numbers of results."""
        return results
