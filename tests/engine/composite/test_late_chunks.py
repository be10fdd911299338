"""Late chunks of texts of any length: spans pooled from windows, beside transformers and a second way to place them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.composite.test_chunking import KINDS, PROMPT, TOLERANCE, VISIBLE, difference
from tests.tiny import MAX_TOKENS, SENTENCES, Layout, Normalize, Pooling

from millpond import AsyncEngine, Engine, PoolingParams
from millpond.engine.composite.late_chunks import CONTEXT, widest, windows
from millpond.errors import InputTooLongError, InvalidRequestError

SHORT = "How deep is it?  The old mill knows."
LONG = " ".join(SENTENCES * 3)


def sentences(text: str) -> list[tuple[int, int]]:
    """Spans of about a sentence each, which overlap by three characters."""
    ends = [i + 1 for i, letter in enumerate(text) if letter in ".?!"] + [len(text)]
    spans = [(max(start - 3, 0), end) for start, end in zip([0, *ends], ends, strict=False)]
    return [(start, end) for start, end in spans if text[start:end].strip(" .?!")]


@pytest.fixture
def folder(checkpoint_of: Callable[..., Path]) -> Path:
    modules = (Pooling(modes=("mean",)), Normalize())
    layout = Layout(modules=modules, prompts={"query": PROMPT, "document": ""})
    return checkpoint_of(KINDS["mean"].family, sentence_transformers=layout)


def by_hand(folder: Path, text: str, spans: Any, prompt: str, limit: int, context: int = CONTEXT) -> np.ndarray:
    """Each span's mean state in the window of its own that has as much context as it can on both sides.

    Every window that the rule may place is tried: of those that hold a span, the one counts whose nearer cut is
    farthest away.
    """
    import torch
    from tests.parity.oracles import oracle
    from transformers import AutoTokenizer

    tokenizer, states = AutoTokenizer.from_pretrained(folder, local_files_only=True), oracle(folder)
    read = tokenizer(prompt + text, return_offsets_mapping=True, return_special_tokens_mask=True)
    special, ids, offsets = read["special_tokens_mask"], read["input_ids"], read["offset_mapping"]
    body = [i for i in range(len(ids)) if not special[i] and offsets[i][1] > len(prompt)]
    before, behind, body_ids = ids[: body[0]], ids[body[-1] + 1 :], [ids[i] for i in body]
    room = limit - len(before) - len(behind)
    ranges = []
    for start, end in spans:
        mine = [
            n
            for n, i in enumerate(body)
            if max(offsets[i][0] - len(prompt), 0) < end and max(offsets[i][1], offsets[i][0] + 1) - len(prompt) > start
        ]
        ranges.append((mine[0], mine[-1] + 1))
    cuts = [0]  # where windows begin, one after the other
    if len(body) > room:
        for start, end in sorted(ranges):
            margin = min(room // context, (room - (end - start)) // 2)
            reach = cuts[-1] + room
            if reach < len(body) and end + margin > reach:
                cuts.append(min(start - margin, len(body) - room))
    rows = []
    for start, end in ranges:
        scored = []
        for cut in cuts:
            stop = min(cut + room, len(body))
            if cut <= start and end <= stop:
                left = 10**9 if cut == 0 else start - cut
                right = 10**9 if stop == len(body) else stop - end
                scored.append((min(left, right), -cut))
        first = -max(scored)[1]
        with torch.inference_mode():
            hidden = states(torch.tensor([*before, *body_ids[first : first + room], *behind]))
        row = hidden[len(before) + start - first : len(before) + end - first].double().mean(0)
        rows.append((row / row.norm()).float().numpy())
    return np.stack(rows)


@pytest.mark.torch
@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("prompt", ["", PROMPT])
@pytest.mark.parametrize("text", [SHORT, LONG], ids=["short", "long"])
def test_a_chunk_is_the_mean_of_its_tokens_in_its_window(
    engine_of: Callable[..., Engine], folder: Path, backend: str, prompt: str, text: str
) -> None:
    engine = engine_of(folder, backend=backend)
    spans = sentences(text)
    found = engine.token_embed([text, SHORT], spans=[spans, [(0, 15)]], prompt=prompt, long_texts="windows")
    expected = by_hand(folder, text, spans, prompt, MAX_TOKENS)
    assert difference(found.embeddings[0], expected) < TOLERANCE
    assert found.embeddings.lengths.tolist() == [len(spans), 1] and not found.truncated.any()
    np.testing.assert_allclose(
        found.embeddings[1], by_hand(folder, SHORT, [(0, 15)], prompt, MAX_TOKENS), atol=TOLERANCE
    )
    # The test must notice chunks that are embedded alone, and windows that are placed otherwise.
    alone = engine.token_embed([text[slice(*span)] for span in spans], prompt=prompt).embeddings
    means = np.stack([rows[1:-1].mean(0) for rows in alone])
    assert difference(found.embeddings[0], means / np.linalg.norm(means, axis=1, keepdims=True)) > VISIBLE
    if text == LONG:
        other = by_hand(folder, text, spans, prompt, MAX_TOKENS, context=2)
        assert difference(found.embeddings[0], other) > VISIBLE


def test_a_text_that_fits_is_read_once_as_without_windows(engine_of: Callable[..., Engine], folder: Path) -> None:
    engine = engine_of(folder)
    spans = [[(0, 15), (15, len(SHORT))], [(4, 8)]]
    plain = engine.token_embed([SHORT, SENTENCES[0]], spans=spans, role="query")
    found = engine.token_embed([SHORT, SENTENCES[0]], spans=spans, role="query", long_texts="windows")
    np.testing.assert_allclose(found.embeddings.flat, plain.embeddings.flat, atol=1e-6)
    assert found.usage == plain.usage
    narrow = engine.token_embed([SHORT], spans=spans[:1], normalize=False, long_texts="windows").embeddings.flat
    assert not np.allclose(np.linalg.norm(narrow, axis=1), 1, atol=1e-2)


def test_every_window_is_full_and_every_chunk_whole_in_one() -> None:
    generator = np.random.default_rng(0)
    for _ in range(300):
        tokens, room = int(generator.integers(1, 2000)), int(generator.integers(16, 300))
        edges = np.unique(np.append(generator.integers(0, tokens, 30), [0, tokens])).tolist()
        pairs = pairwise(edges)
        ranges = [(max(start - 2, 0), end) for start, end in pairs if end - start + 2 <= room]
        found = windows(ranges, tokens, room)
        assert all(first >= 0 and last <= tokens and last - first == min(room, tokens) for first, last in found)
        assert found == sorted(set(found))
        for start, end in ranges:
            first, last = widest(found, (start, end), tokens)
            assert first <= start and end <= last
            wanted = min(room // CONTEXT, (room - (end - start)) // 2)
            assert first == 0 or start - first >= wanted, (first, start)
            assert last == tokens or last - end >= wanted, (last, end)


def test_a_long_text_costs_about_one_forward(engine_of: Callable[..., Engine], folder: Path) -> None:
    engine = engine_of(folder)
    spans = [match.span() for match in re.finditer(r"\S+", LONG)]
    found = engine.token_embed([LONG], spans=[spans], long_texts="windows").usage.prompt_tokens
    whole = engine.count_tokens([LONG])[0]
    assert whole < found < 1.5 * whole < sum(engine.count_tokens([LONG[slice(*span)] for span in spans]))
    assert engine.token_embed([LONG] * 3, spans=[spans] * 3, long_texts="windows").usage.prompt_tokens == 3 * found


def test_order_duplicates_and_empty_calls(engine_of: Callable[..., Engine], folder: Path) -> None:
    engine = engine_of(folder)
    texts, spans = [LONG, SHORT, LONG, "", SHORT], [sentences(LONG), [(0, 4)], sentences(LONG)[:3], [], [(4, 8)]]
    found = engine.token_embed(texts, spans=spans, long_texts="windows").embeddings
    for text, own, rows in zip(texts, spans, found, strict=True):
        np.testing.assert_allclose(
            engine.token_embed([text], spans=[own], long_texts="windows").embeddings[0], rows, atol=1e-6
        )
    assert engine.token_embed([], spans=[], long_texts="windows").embeddings.flat.shape == (0, 48)
    awaited = asyncio.run(AsyncEngine(engine).token_embed(texts, spans=spans, long_texts="windows")).embeddings
    np.testing.assert_allclose(awaited.flat, found.flat, atol=1e-6)


def test_a_chunk_without_tokens_is_zeros(engine_of: Callable[..., Engine], folder: Path) -> None:
    found = engine_of(folder).token_embed(["a   b", "   "], spans=[[(1, 4), (0, 1)], [(0, 3)]], long_texts="windows")
    assert found.embeddings.flat.any(axis=1).tolist() == [False, True, False]


def test_what_makes_no_sense_is_refused_before_anything_is_queued(
    engine_of: Callable[..., Engine], folder: Path
) -> None:
    engine = engine_of(folder)
    with pytest.raises(InvalidRequestError, match="long_texts='windows' means nothing to embed; pass 'mean'"):
        engine.embed([SHORT], long_texts="windows")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="text at index 0 has none; pass spans"):
        engine.token_embed([SHORT], long_texts="windows")
    with pytest.raises(InvalidRequestError, match="long_texts='mean' means nothing to token_embed; pass 'windows'"):
        engine.submit("token_embed", [SHORT], PoolingParams(long_texts="mean"))
    with pytest.raises(InputTooLongError, match=r"a span of the text at index 1 has \d+ tokens, more than the 62 that"):
        engine.token_embed([SHORT, LONG], spans=[[(0, 4)], [(0, len(LONG))]], long_texts="windows")
    with pytest.raises(InputTooLongError, match=r"prompt and special tokens take .* of max_length=64"):
        engine.token_embed([SHORT], spans=[[(0, 4)]], prompt=LONG, long_texts="windows")
    assert engine.stats().waiting_texts == 0
