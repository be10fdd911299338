"""Texts longer than the model reads: windows averaged into one vector, and vectors of spans from one long forward."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny import MAX_TOKENS, SENTENCES, Layout, Normalize, Pooling
from tests.tiny.heads import write_stanford

from millpond import AsyncEngine, Engine, PoolingParams, TokenIds, VectorCache
from millpond.errors import EngineOverloadedError, InputTooLongError, InvalidRequestError

TOLERANCE = 1e-5
VISIBLE = 1e-3
SHORT = ("a", SENTENCES[0], "How deep is it?", "")
LONG = (" ".join(SENTENCES), " ".join(SENTENCES[7:]) + " é池", " ".join(SENTENCES[:5]) * 4)
PROMPT = "query: "


@dataclass(frozen=True)
class Kind:
    """A checkpoint: its backbone, its pooling, and the number of special tokens around a text."""

    family: str
    mode: str
    around: tuple[int, int]
    include_prompt: bool = True


KINDS = {
    "cls": Kind("bert", "cls", (1, 1)),
    "mean": Kind("xlm-roberta", "mean", (1, 1)),
    "mean-without-prompt": Kind("modernbert", "mean", (1, 1), include_prompt=False),
    "last": Kind("qwen3", "lasttoken", (0, 1)),
}


@pytest.fixture
def folders(checkpoint_of: Callable[..., Path]) -> Callable[[str], Path]:
    def folder(name: str) -> Path:
        kind = KINDS[name]
        modules = (Pooling(modes=(kind.mode,), include_prompt=kind.include_prompt), Normalize())
        layout = Layout(modules=modules, prompts={"query": PROMPT, "document": ""})
        return checkpoint_of(kind.family, sentence_transformers=layout)

    return folder


FAST = ("mean-without-prompt", "cls")


@pytest.fixture(params=[each if each in FAST else pytest.param(each, marks=pytest.mark.contract) for each in KINDS])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def engine(name: str, folders: Any, engine_of: Callable[..., Engine]) -> Engine:
    return engine_of(folders(name), hf_overrides={"is_matryoshka": True})


def parts_by_hand(
    folder: Path, kind: Kind, text: str, prompt: str, limit: int = MAX_TOKENS
) -> tuple[list[list[int]], list[int], int]:
    """The windows of a text, their tokens of text, and the tokens in front, by transformers' tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    special = tokenizer("")["input_ids"]
    before, behind = special[: kind.around[0]], special[kind.around[0] :]
    assert (len(before), len(behind)) == kind.around
    read = tokenizer(prompt + text, add_special_tokens=False, return_offsets_mapping=True)
    ids = read["input_ids"]
    begins = next((i for i, (_, end) in enumerate(read["offset_mapping"]) if end > len(prompt)), len(ids))
    before = before + ids[:begins]
    room = limit - len(before) - len(behind)
    cut = [ids[i : i + room] for i in range(begins, len(ids), room)]
    return [before + part + behind for part in cut], [len(part) for part in cut], len(before)


def by_hand(
    folder: Path, kind: Kind, text: str, *, prompt: str = "", width: int = 48, weigh: bool = True
) -> np.ndarray:
    """The vector of a text that needs several windows."""
    import torch
    from tests.parity.oracles import oracle

    states, (parts, counts, front) = oracle(folder), parts_by_hand(folder, kind, text, prompt)
    assert len(parts) > 1
    rows = []
    for part in parts:
        with torch.inference_mode():
            hidden = states(torch.tensor(part))
        hidden = hidden[0 if kind.include_prompt or not prompt else front :]
        pooled = {"cls": hidden[0], "mean": hidden.mean(0), "lasttoken": hidden[-1]}[kind.mode][:width]
        rows.append(pooled / pooled.norm())
    weights = torch.tensor(counts, dtype=torch.float64) if weigh else torch.ones(len(rows), dtype=torch.float64)
    mean = (torch.stack(rows).double() * weights[:, None]).sum(0) / weights.sum()
    return (mean / mean.norm()).float().numpy()


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


# --- Windows --------------------------------------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.parametrize("prompt", ["", PROMPT])
def test_a_long_text_is_the_weighted_mean_of_its_windows(name: str, engine: Engine, folders: Any, prompt: str) -> None:
    found = engine.embed(LONG, prompt=prompt, long_texts="mean")
    expected = np.stack([by_hand(folders(name), KINDS[name], text, prompt=prompt) for text in LONG])
    assert difference(found.embeddings, expected) < TOLERANCE
    assert found.embeddings.dtype == np.float32
    assert not found.truncated.any()
    assert not found.cached.any()
    # The test must notice equal weights, a cut text, and a prompt that was pooled by mistake.
    even = np.stack([by_hand(folders(name), KINDS[name], text, prompt=prompt, weigh=False) for text in LONG])
    assert difference(found.embeddings, even) > VISIBLE
    assert difference(found.embeddings, engine.embed(LONG, prompt=prompt).embeddings) > VISIBLE
    if prompt and not KINDS[name].include_prompt:
        whole = Kind(KINDS[name].family, KINDS[name].mode, KINDS[name].around)
        wrong = np.stack([by_hand(folders(name), whole, text, prompt=prompt) for text in LONG])
        assert difference(found.embeddings, wrong) > VISIBLE


def test_a_text_that_fits_is_not_touched(name: str, engine: Engine) -> None:
    for options in ({}, {"role": "query"}, {"normalize": False}, {"dimensions": 16}):
        plain = engine.embed(SHORT, **options)
        chunked = engine.embed(SHORT, long_texts="mean", **options)
        np.testing.assert_allclose(chunked.embeddings, plain.embeddings, atol=1e-6)
        assert chunked.usage == plain.usage


def test_order_and_duplicates(engine: Engine) -> None:
    texts = [LONG[0], SHORT[1], LONG[1], LONG[0], "", SHORT[1], LONG[2]]
    found = engine.embed(texts, long_texts="mean")
    for text, row in zip(texts, found.embeddings, strict=True):
        np.testing.assert_allclose(engine.embed([text], long_texts="mean").embeddings[0], row, atol=1e-6)
    np.testing.assert_array_equal(found.embeddings[0], found.embeddings[3])
    np.testing.assert_array_equal(found.embeddings[1], found.embeddings[5])
    alone = {text: engine.embed([text], long_texts="mean").usage.prompt_tokens for text in set(texts)}
    assert found.usage.prompt_tokens == sum(alone[text] for text in texts)


def test_means_are_quantized_and_not_the_windows(engine: Engine) -> None:
    texts = [*LONG, *SHORT]
    exact = engine.embed(texts, long_texts="mean").embeddings
    for output_dtype, expected in (("float16", exact.astype(np.float16)), ("ubinary", np.packbits(exact > 0, axis=1))):
        found = engine.embed(texts, long_texts="mean", output_dtype=output_dtype).embeddings
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def test_what_makes_no_sense_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="takes texts only"):
        engine.submit("embed", [TokenIds((1, 2, 3))], PoolingParams(long_texts="mean"))
    with pytest.raises(InvalidRequestError, match="long_texts='median' is unknown; choose one of mean"):
        engine.embed(LONG, long_texts="median")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="long_texts='mean' means nothing to token_embed"):
        engine.encode(LONG, task="token_embed", params=PoolingParams(long_texts="mean"))
    with pytest.raises(TypeError, match=r"embed\(\[text\]\)"):
        engine.embed(LONG[0], long_texts="mean")
    with pytest.raises(InvalidRequestError, match="index 1 holds a lone surrogate"):
        engine.embed([LONG[0], "\ud800"], long_texts="mean")
    with pytest.raises(InputTooLongError, match=r"prompt and special tokens take .* of max_length=64"):
        engine.embed(LONG, prompt=" ".join(SENTENCES), long_texts="mean")
    # Nothing is truncated, so nothing is refused.
    refused = engine.embed(LONG, long_texts="mean", truncate="error")
    np.testing.assert_allclose(refused.embeddings, engine.embed(LONG, long_texts="mean").embeddings, atol=1e-6)


def test_the_event_loop_and_streams_get_the_same(engine: Engine) -> None:
    texts = [*LONG, *SHORT]
    expected = engine.embed(texts, long_texts="mean").embeddings

    async def run() -> list[Any]:
        pool = AsyncEngine(engine)
        params = PoolingParams(long_texts="mean")
        streamed = [row async for row in pool.embed_iter(texts, long_texts="mean")]
        return [
            (await pool.embed(texts, long_texts="mean")).embeddings,
            (await pool.submit("embed", texts, params)).embeddings,
            (await pool.encode(texts, task="embed", params=params)).embeddings,
            np.stack(streamed),
        ]

    for found in [*asyncio.run(run()), np.stack(list(engine.embed_iter(texts, long_texts="mean")))]:
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_the_event_loop_never_tokenizes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    right, threads = type(engine._loaded.encoder.texts).read_whole, []

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread())
        return right(self, *args, **options)

    monkeypatch.setattr(type(engine._loaded.encoder.texts), "read_whole", noted)

    async def run() -> None:
        pool, params = AsyncEngine(engine), PoolingParams(long_texts="mean")
        await pool.embed(LONG, long_texts="mean")
        await pool.submit("embed", LONG, params)
        await pool.encode(LONG, task="embed", params=params)

    asyncio.run(run())
    assert len(threads) == 3
    assert threading.main_thread() not in threads


# --- Windows and the machinery around them --------------------------------------------------------------------------


@pytest.fixture
def gated(folders: Any) -> Iterator[tuple[Engine, threading.Event, Any]]:
    """An engine that runs no batch before the event is set, and the sizes of the batches that it ran."""
    gate, batches = threading.Event(), []
    with Engine(folders("mean"), dtype="float32", device="cpu", max_queue=8, max_batch_tokens=64) as engine:
        right = engine._replicas.runner.run

        def run(requests: Any) -> Any:
            gate.wait(timeout=30)
            batches.append([request.length for request in requests])
            return right(requests)

        engine._replicas.runner.run = run  # type: ignore[method-assign]
        yield engine, gate, batches
        gate.set()


def test_a_cancelled_call_takes_its_windows_along(gated: Any) -> None:
    engine, gate, batches = gated
    future = engine.submit("embed", [*LONG, *SHORT], PoolingParams(long_texts="mean"))
    assert future.cancel()
    assert not engine._dispatcher._admission.calls()
    gate.set()
    engine.embed(["a"])
    assert len(batches) <= 2  # the running batch and the last one


@pytest.mark.parametrize("early", [True, False])
def test_a_cancelled_task_takes_its_windows_along(gated: Any, early: bool) -> None:
    engine, gate, _ = gated
    futures, entered, right = [], threading.Event(), engine._submission.start

    def noted(*args: Any, **options: Any) -> Any:
        entered.set()
        futures.append(right(*args, **options))
        return futures[0]

    engine._submission.start = noted  # type: ignore[method-assign]

    async def run(early: bool) -> None:
        task = asyncio.create_task(AsyncEngine(engine).embed(LONG, long_texts="mean"))
        await asyncio.sleep(0)
        await asyncio.to_thread(entered.wait, 30)
        while not early and not futures:
            await asyncio.to_thread(entered.wait, 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run(early))
    assert futures[0].cancelled()
    assert not engine._dispatcher._admission.calls()
    gate.set()


def test_a_call_alone_may_have_any_number_of_windows(gated: Any) -> None:
    engine, gate, _ = gated
    texts = [f"{text} {i}" for i in range(3) for text in (*LONG, *SHORT)]
    whole = engine.submit("embed", texts, PoolingParams(long_texts="mean"))
    with pytest.raises(EngineOverloadedError, match=r"max_queue=8"):
        engine.submit("embed", LONG, PoolingParams(long_texts="mean"))
    gate.set()
    assert whole.result(timeout=30).embeddings.shape == (len(texts), 48)


@pytest.mark.torch
def test_the_cache_holds_texts_and_windows(name: str, folders: Any, tmp_path: Path) -> None:
    options = {"dtype": "float32", "device": "cpu", "hf_overrides": {"is_matryoshka": True}}
    with VectorCache(tmp_path / "v.db") as cache, Engine(folders(name), cache=cache, **options) as engine:
        plain = engine.embed(SHORT)
        first = engine.embed([*SHORT, LONG[0]], long_texts="mean")
        assert first.cached.tolist() == [True] * len(SHORT) + [False]
        np.testing.assert_allclose(first.embeddings[: len(SHORT)], plain.embeddings, atol=1e-6)
        held = len(cache)
        again = engine.embed([*SHORT, LONG[0]], long_texts="mean")
        assert again.cached.all()
        assert again.usage == first.usage
        np.testing.assert_array_equal(again.embeddings, first.embeddings)
        narrow = engine.embed([LONG[0]], long_texts="mean", dimensions=16)
        assert narrow.cached.all()
        assert len(cache) == held
        expected = by_hand(folders(name), KINDS[name], LONG[0], width=16)
        assert difference(narrow.embeddings[0], expected) < TOLERANCE
        # Added text costs its own windows only; another prompt, and embed without chunking, have other vectors.
        engine.embed([LONG[0] + " " + LONG[0]], long_texts="mean")
        windows = len(parts_by_hand(folders(name), KINDS[name], LONG[0], "")[0])
        added = len(parts_by_hand(folders(name), KINDS[name], LONG[0] + " " + LONG[0], "")[0]) - windows + 1
        assert len(cache) == held + added
        assert not engine.embed([LONG[0]], long_texts="mean", prompt=PROMPT).cached.any()
        assert not engine.embed([LONG[0]]).cached.any()


def test_token_ids_have_no_prompt_to_leave_out(folders: Any, tmp_path: Path) -> None:
    """Token ids get no prompt: none of them may be left out of the mean."""
    with Engine(folders("mean-without-prompt"), dtype="float32", device="cpu", cache=tmp_path / "v.db") as engine:
        ids = TokenIds(tuple(engine.tokenize([SENTENCES[0]])[0]))
        expected = engine.embed([SENTENCES[0]]).embeddings
        for role in (None, "query"):
            found = engine.submit("embed", [ids], PoolingParams(role=role)).result()
            np.testing.assert_allclose(found.embeddings, expected, atol=1e-6)
            assert not found.cached.any()
        assert engine.submit("embed", [ids], PoolingParams(role="query")).result().cached.all()
        assert not engine.submit("embed", [ids, "a text beside them"]).result().cached.any()


# --- Late chunking --------------------------------------------------------------------------------------------------

TEXT = "How deep is it?  The old mill knows."
SPANS = [(0, 15), (15, len(TEXT)), (4, 30), (0, len(TEXT)), (4, 8)]


def spans_by_hand(folder: Path, text: str, spans: Any, prompt: str, *, normalize: bool, width: int = 48) -> np.ndarray:
    """The mean of the hidden states of the tokens that overlap each span, by transformers."""
    import torch
    from tests.parity.oracles import oracle
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    read = tokenizer(prompt + text, return_offsets_mapping=True, return_special_tokens_mask=True)
    with torch.inference_mode():
        hidden = oracle(folder)(torch.tensor(read["input_ids"]))
    rows = []
    for start, end in spans:
        mine = [
            i
            for i, (first, stop) in enumerate(read["offset_mapping"])
            if not read["special_tokens_mask"][i] and stop > len(prompt)
            if max(first, len(prompt)) < end + len(prompt) and max(stop, first + 1) > start + len(prompt)
        ]
        row = hidden[mine].double().mean(0)[:width]
        rows.append((row / row.norm() if normalize else row).float().numpy())
    return np.stack(rows)


@pytest.mark.torch
@pytest.mark.parametrize("options", [{"role": "query"}, {"prompt": "Ein Präfix, 池: "}])
def test_a_span_is_the_mean_of_its_tokens_in_the_whole_text(name: str, engine: Engine, folders: Any, options: Any):
    prompt = options.get("prompt", PROMPT if options.get("role") == "query" else "")
    found = engine.token_embed([TEXT, TEXT], spans=[SPANS, SPANS[:1]], **options)
    assert found.embeddings.lengths.tolist() == [len(SPANS), 1]
    expected = spans_by_hand(folders(name), TEXT, SPANS, prompt, normalize=True)
    assert difference(found.embeddings[0], expected) < TOLERANCE
    np.testing.assert_allclose(found.embeddings[1][0], found.embeddings[0][0], atol=1e-6)
    assert found.usage.prompt_tokens == 2 * engine.token_embed([TEXT], **options).usage.prompt_tokens
    # The test must notice a span that is embedded alone, and offsets shifted by a prompt.
    alone = engine.token_embed([TEXT[slice(*SPANS[1])]], **options).embeddings[0].mean(0)
    assert difference(found.embeddings[0][1], alone / np.linalg.norm(alone)) > VISIBLE
    moved = [(max(start - 7, 0), end - 7) for start, end in SPANS[:3]]
    wrong = spans_by_hand(folders(name), TEXT, moved, prompt, normalize=True)
    assert difference(found.embeddings[0][:3], wrong) > VISIBLE


@pytest.mark.torch
@pytest.mark.parametrize(("width", "normalize"), [(16, True), (48, False)])
def test_rows_of_spans_are_cut_and_normalized(name: str, engine: Engine, folders: Any, width: int, normalize: bool):
    found = engine.token_embed([TEXT], spans=[SPANS], dimensions=width, normalize=normalize).embeddings[0]
    expected = spans_by_hand(folders(name), TEXT, SPANS, "", normalize=normalize, width=width)
    assert difference(found, expected) < TOLERANCE


def test_spans_of_several_kinds_in_one_call(engine: Engine) -> None:
    found = engine.token_embed([TEXT, "", SENTENCES[0], TEXT], spans=[SPANS, [], [(np.int64(0), 3)], SPANS])
    assert found.embeddings.lengths.tolist() == [len(SPANS), 0, 1, len(SPANS)]
    np.testing.assert_array_equal(found.embeddings[0], found.embeddings[3])
    assert engine.token_embed([], spans=[]).embeddings.flat.shape == (0, 48)
    same = asyncio.run(AsyncEngine(engine).token_embed([TEXT], spans=[SPANS])).embeddings[0]
    np.testing.assert_allclose(same, found.embeddings[0], atol=1e-6)


def test_a_span_that_was_cut_off_is_named(engine: Engine) -> None:
    long = LONG[0]
    with pytest.raises(InvalidRequestError, match=r"span 0, .* index 0 has no token.*was cut off.*raise max_length"):
        engine.token_embed([long], spans=[[(len(long) - 5, len(long))]])
    with pytest.raises(InvalidRequestError, match=r"span 0, \(0, 5\), of the text at index 0 has no token"):
        engine.token_embed([long], spans=[[(0, 5)]], truncate="start")
    kept = engine.token_embed([long], spans=[[(len(long) - 5, len(long))]], truncate="start")
    assert kept.truncated.all()
    with pytest.raises(InputTooLongError, match="at index 0 has"):
        engine.token_embed([long], spans=[[(0, 5)]], truncate="error")


@pytest.mark.parametrize(
    ("texts", "spans", "message"),
    [
        ([TEXT], [], "1 texts and 0 lists of spans"),
        ([TEXT, "abc"], [SPANS, [(0, 4)]], r"index 1 has the span \(0, 4\); .* 0 <= start < end <= 3"),
        ([TEXT], [[(-1, 5)]], r"index 0 has the span \(-1, 5\)"),
        ([TEXT], [[(True, 5)]], r"has the span \(True, 5\)"),
        ([TEXT], [None], r"the spans of the text at index 0 are None; pass a list"),
        ([TEXT, 3], [SPANS, []], "the text at index 1 is a int"),
    ],
)
def test_wrong_spans_are_refused_before_anything_is_queued(engine: Engine, texts: Any, spans: Any, message: str):
    before = engine.stats().waiting_texts
    with pytest.raises(InvalidRequestError, match=message):
        engine.token_embed(texts, spans=spans)
    assert engine.stats().waiting_texts == before
    with pytest.raises(TypeError, match=r"token_embed\(\[text\]\)"):
        engine.token_embed("one text", spans=[[(0, 1)]])


def test_late_interaction_has_no_spans(engine_of: Callable[..., Engine]) -> None:
    with pytest.raises(InvalidRequestError, match="index 0 has spans, which a late-interaction checkpoint"):
        engine_of(write_stanford).token_embed([TEXT], spans=[SPANS])
