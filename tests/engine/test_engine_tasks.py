"""Every task through every method of the engine, alone and beside other calls, and what each refuses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny import SENTENCES, TEXTS, Layout, Normalize, Pooling, write_checkpoint
from tests.tiny.checkpoints import token_id
from tests.tiny.heads import STEP, write_cross_encoder, write_m3, write_reward, write_splade, write_stanford

from millpond import AsyncEngine, Engine, PoolingParams, Ragged, TokenIds
from millpond.errors import InvalidRequestError, UnsupportedTaskError

LONG = " ".join(SENTENCES)
DOCUMENTS = (SENTENCES[0], SENTENCES[1], "a", SENTENCES[0], "", "How deep is it?")
QUERY = "How deep is the mill pond?"
SHORT_QUERY = "mill"  # fits a late-interaction checkpoint's queries
PROMPTS = {"query": "find: ", "document": "keep: "}


def _embedder(folder: Path) -> Path:
    layout = Layout(modules=(Pooling(modes=("mean",)), Normalize()), prompts=PROMPTS)
    return write_checkpoint(folder, "bert", sentence_transformers=layout)


WRITERS: dict[str, Callable[[Path], Path]] = {
    "embedder": _embedder,
    "jina": lambda folder: write_checkpoint(folder, "jina"),
    "classifier": lambda folder: write_checkpoint(folder, "bert", head="SequenceClassification"),
    "ner": lambda folder: write_checkpoint(folder, "bert", head="TokenClassification"),
    "reranker": write_cross_encoder,
    "colbert": write_stanford,
    "steps": lambda folder: write_reward(folder, "Qwen2ForProcessRewardModel"),
    "rewarder": lambda folder: write_reward(folder, "InternLM2ForRewardModel"),
    "language": lambda folder: write_checkpoint(folder, "mistral", wrapped=True),
    "splade": write_splade,
    "m3": write_m3,
}


@pytest.fixture
def folders(checkpoint_of: Callable[..., Path]) -> Callable[[str], Path]:
    return lambda name: checkpoint_of(WRITERS[name])


@pytest.fixture
def engines(engine_of: Callable[..., Engine]) -> Callable[[str], Engine]:
    return lambda name: engine_of(WRITERS[name], hf_overrides={"is_matryoshka": True})


def pairs_of(documents: Sequence[str] = DOCUMENTS) -> list[tuple[str, str]]:
    return [(QUERY, document) for document in documents]


def rows(output: Any) -> list[np.ndarray]:
    """The result of any task as one array per item."""
    for name in ("embeddings", "probs", "scores", "rewards"):
        found = getattr(output, name, None)
        if isinstance(found, list):  # sparse, in a fixed order
            return [np.array(sorted(row.items()), dtype=np.float32).reshape(-1, 2) for row in found]
        if found is not None:
            return list(found)
    raise AssertionError(f"{output} has no rows")


def same(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    assert type(found) is type(expected)
    left, right = rows(found), rows(expected)
    assert [a.shape for a in left] == [b.shape for b in right]
    for a, b in zip(left, right, strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)
    assert found.truncated.tolist() == expected.truncated.tolist()
    assert found.usage == expected.usage
    if hasattr(found, "entities"):
        assert [[e.label for e in each] for each in found] == [[e.label for e in each] for each in expected]


# checkpoint, task, items, options of its method
CASES: list[tuple[str, str, Sequence[Any], Mapping[str, Any]]] = [
    ("embedder", "embed", TEXTS, {"role": "query", "dimensions": 16}),
    ("embedder", "token_embed", TEXTS, {"normalize": False}),
    ("embedder", "score", pairs_of(), {}),
    ("jina", "embed", TEXTS, {"adapter": "classification"}),
    ("jina", "token_embed", TEXTS, {"role": "document"}),
    ("classifier", "classify", TEXTS, {"activation": False}),
    ("classifier", "token_classify", TEXTS, {}),
    ("ner", "token_classify", TEXTS, {"aggregation": "simple", "activation": "sigmoid"}),
    ("reranker", "score", pairs_of(), {"activation": "sigmoid"}),
    ("reranker", "classify", TEXTS, {}),
    ("colbert", "token_embed", TEXTS, {"role": "query"}),
    ("colbert", "score", pairs_of(), {}),
    ("steps", "reward", [f"{text}{STEP} so{STEP}" for text in TEXTS[:2]], {"activation": True}),
    ("rewarder", "reward", TEXTS, {}),
    ("rewarder", "embed", TEXTS, {}),
    ("language", "reward", TEXTS, {"returned_token_ids": (5, 9)}),
    ("language", "embed", TEXTS, {}),
    ("splade", "sparse_embed", TEXTS, {}),
    ("m3", "sparse_embed", TEXTS, {}),
    ("m3", "token_embed", TEXTS, {}),
    ("m3", "embed", TEXTS, {}),
]
each_case = pytest.mark.parametrize(
    ("name", "task", "items", "options"), CASES, ids=[f"{name}-{task}" for name, task, *_ in CASES]
)


def call(engine: Any, task: str, items: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """The task's own method (of an AsyncEngine a coroutine)."""
    if task == "score":
        return engine.score([query for query, _ in items], [document for _, document in items], **options)
    return getattr(engine, task)(items, **options)


# --- Methods -------------------------------------------------------------------------------------------------------


@each_case
def test_every_method_gives_the_same_result(engines: Any, name: str, task: Any, items: Any, options: Any) -> None:
    engine = engines(name)
    expected, params = call(engine, task, items, options), PoolingParams(**options)
    assert len(rows(expected)) == len(items)
    same(engine.encode(items, task=task, params=params), expected)
    same(engine.encode(items, task=task, params=PoolingParams(task=task, **options)), expected)
    same(engine.submit(task, items, params).result(), expected)
    same(call(engine, task, items, {**options, "show_progress": True}), expected)

    async def awaited() -> list[Any]:
        pool = AsyncEngine(engine)
        return [
            await call(pool, task, items, options),
            await pool.encode(items, task=task, params=params),
            await pool.submit(task, items, params),
            await call(pool, task, items, {**options, "show_progress": True}),
        ]

    for found in asyncio.run(awaited()):
        same(found, expected)


@each_case
def test_each_item_is_what_it_is_alone(engines: Any, name: str, task: Any, items: Any, options: Any) -> None:
    """Duplicates, which run once, and items in another order too."""
    engine, params = engines(name), PoolingParams(**options)
    expected = engine.encode(items, task=task, params=params)
    mixed = [*reversed(items), items[0], items[-1]]
    found = rows(engine.encode(mixed, task=task, params=params))
    for row, item in zip(found, mixed, strict=True):
        np.testing.assert_allclose(row, rows(expected)[list(items).index(item)], atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(row, rows(engine.encode([item], task=task, params=params))[0], atol=1e-5, rtol=1e-5)
    assert len({row.tobytes() for row in rows(expected)}) > 1  # equal rows would pass the test above


@each_case
def test_an_empty_call_has_the_right_shape(engines: Any, name: str, task: Any, items: Any, options: Any) -> None:
    engine = engines(name)
    whole, empty = call(engine, task, items, options), call(engine, task, [], options)
    assert type(empty) is type(whole)
    assert rows(empty) == []
    assert empty.truncated.shape == (0,)
    assert empty.usage.prompt_tokens == 0
    for field in ("embeddings", "probs", "scores", "rewards"):
        held = getattr(whole, field, None)
        if isinstance(held, Ragged):
            assert getattr(empty, field).flat.shape == (0, held.flat.shape[1])
        elif isinstance(held, np.ndarray):
            assert getattr(empty, field).shape == (0, *held.shape[1:])


# --- Many callers ---------------------------------------------------------------------------------------------------


def together(
    engine: Engine, jobs: Sequence[tuple[Any, Any, Mapping[str, Any]]], monkeypatch: Any
) -> tuple[list[Any], list[set[Any]]]:
    """The jobs' results, from as many threads at once, and the calls of each batch, as (call, task).

    No batch is picked before every call is in the scheduler, and the first one takes all that its budget holds.
    """
    gate, dispatcher, runner = threading.Event(), engine._dispatcher, engine._replicas.runner
    scheduler, admission = dispatcher._scheduler, dispatcher._admission
    pick, submit, run = scheduler.pick, dispatcher.submit, runner.run
    submitted: list[None] = []
    batches: list[set[Any]] = []
    calls = len(jobs) + sum("long_texts" in options for _, _, options in jobs)  # windows are a second call

    def held(lanes: int = 1, *, prepare: bool = True) -> Any:
        assert gate.wait(timeout=60)
        return pick()

    def counted(*args: Any, **options: Any) -> Any:
        future = submit(*args, **options)
        submitted.append(None)
        return future

    def recorded(requests: Any) -> Any:
        batches.append({(id(request.call), request.call.plan.task) for request in requests})
        return run(requests)

    def all_queued() -> bool:
        """Every call was made, and is tokenized, or left to a worker to be tokenized, or over."""
        queued = {*scheduler._deferred, *scheduler._queues.copy()}
        return len(submitted) == calls and queued.issuperset(admission.calls())

    monkeypatch.setattr(scheduler, "pick", held)
    monkeypatch.setattr(dispatcher, "submit", counted)
    monkeypatch.setattr(runner, "run", recorded)
    with ThreadPoolExecutor(len(jobs)) as threads:
        futures = [threads.submit(call, engine, *job) for job in jobs]
        try:
            while not all_queued() and not any(future.done() for future in futures):
                threading.Event().wait(0.001)
        finally:
            gate.set()
        results = [future.result(timeout=60) for future in futures]
    return results, batches


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        (
            "reranker",
            [
                ("classify", {"activation": False}),
                ("classify", {}),
                ("token_classify", {"aggregation": "max"}),
                ("score", {"activation": "sigmoid"}),
                ("score", {}),
            ],
        ),
        ("ner", [("token_classify", {"aggregation": how}) for how in ("none", "simple", "first", "average", "max")]),
        (
            "jina",
            [
                ("embed", {"role": "query"}),
                ("embed", {"adapter": "separation", "dimensions": 16}),
                ("token_embed", {"role": "document"}),
                ("embed", {"long_texts": "mean"}),
                ("token_embed", {"adapter": "classification", "normalize": False}),
            ],
        ),
        ("m3", [("sparse_embed", {}), ("embed", {}), ("token_embed", {}), ("sparse_embed", {"truncate": "start"})]),
        ("splade", [("sparse_embed", {}), ("sparse_embed", {"truncate": "start"})]),
    ],
)
def test_callers_share_batches_and_get_what_is_theirs(engines: Any, monkeypatch: Any, name: str, kinds: Any) -> None:
    engine, jobs = engines(name), []
    for i in range(32):
        task, options = kinds[i % len(kinds)]
        texts = [f"{text} {i % 7}" for text in TEXTS[i % 4 :: 2]]
        jobs.append((task, [(QUERY, text) for text in texts] if task == "score" else texts, options))
    expected = [call(engine, *job) for job in jobs]
    results, batches = together(engine, jobs, monkeypatch)
    assert max(map(len, batches)) > 1, "no batch was shared"
    shared = max(len({task for _, task in batch}) for batch in batches)
    assert (shared > 1) == (len({task for task, _ in kinds}) > 1)
    for found, alone in zip(results, expected, strict=True):
        same(found, alone)


# --- Scores ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["embedder", "reranker", "colbert"])
def test_one_to_one_one_to_many_and_many_to_many(engines: Any, name: str) -> None:
    engine = engines(name)
    many = engine.score(QUERY, DOCUMENTS).scores
    np.testing.assert_allclose(engine.score([QUERY], DOCUMENTS).scores, many, rtol=1e-5)
    np.testing.assert_allclose(engine.score([QUERY] * len(DOCUMENTS), DOCUMENTS).scores, many, rtol=1e-5)
    np.testing.assert_allclose(engine.encode(pairs_of(), task="score").scores, many, rtol=1e-5)
    assert engine.score(QUERY, DOCUMENTS[0]).scores.shape == (1,)
    assert many[0] == many[3]
    turned = engine.score(DOCUMENTS, [QUERY] * len(DOCUMENTS)).scores
    assert np.abs(turned - many).max() > 1e-4
    for queries, documents in [(["a", "b"], ["c"]), (["a", "b"], ["c"] * 3), ([], ["c"]), (["a", "b"], [])]:
        with pytest.raises(InvalidRequestError, match=f"{len(queries)} queries and {len(documents)} documents"):
            engine.score(queries, documents)


@pytest.mark.parametrize("name", ["embedder", "reranker", "colbert"])
def test_a_ranking(engines: Any, name: str) -> None:
    engine = engines(name)
    scores = engine.score(QUERY, DOCUMENTS, method="maxsim" if name == "embedder" else "auto").scores
    ranked = engine.rerank(QUERY, DOCUMENTS)
    assert [hit.index for hit in ranked] == np.argsort(-scores, kind="stable").tolist()
    for hit in ranked:
        assert hit.document == DOCUMENTS[hit.index]
        assert hit.relevance_score == pytest.approx(scores[hit.index], rel=1e-5)
    order = [hit.index for hit in ranked]
    assert order.index(0) + 1 == order.index(3)  # equal texts, in the caller's order
    best = engine.rerank(QUERY, DOCUMENTS, top_n=2)
    assert [hit.index for hit in best] == order[:2]
    assert best.truncated.shape == (len(DOCUMENTS),)
    assert len(engine.rerank(QUERY, DOCUMENTS, top_n=99)) == len(DOCUMENTS)
    awaited = asyncio.run(AsyncEngine(engine).rerank(QUERY, DOCUMENTS, top_n=2))
    assert [hit.index for hit in awaited] == order[:2]
    for wrong in (0, -1, True, 1.5, "2"):
        with pytest.raises(InvalidRequestError, match="top_n="):
            engine.rerank(QUERY, DOCUMENTS, top_n=wrong)


def test_token_ids_of_a_cross_encoder_are(engines: Any) -> None:
    engine = engines("reranker")
    ids = TokenIds(tuple(engine.token_ids("classify", "a b", PoolingParams())))
    assert engine.encode([("a", "b"), ids], task="score").scores.shape == (2,)


# --- Composite calls ------------------------------------------------------------------------------------------------


@pytest.fixture
def held(folders: Any) -> Iterator[Callable[[str], Engine]]:
    """Engines that run nothing before the end of the test."""
    gate, made = threading.Event(), []

    def hold(name: str) -> Engine:
        made.append(engine := Engine(folders(name), dtype="float32", device="cpu", max_queue=8))
        run = engine._replicas.runner.run
        engine._replicas.runner.run = lambda requests: gate.wait(timeout=30) and run(requests)
        return engine

    yield hold
    gate.set()
    for engine in made:
        engine.close()


@pytest.mark.parametrize("name", ["embedder", "colbert"])
def test_a_cancelled_score_cancels_both_sides(held: Any, name: str) -> None:
    engine = held(name)
    future = engine.submit("score", pairs_of())
    assert len(engine._dispatcher._admission.calls()) == 2
    assert future.cancel()
    assert future.cancelled()
    assert not engine._dispatcher._admission.calls()

    async def awaited() -> None:
        task = asyncio.create_task(AsyncEngine(engine).score(QUERY, DOCUMENTS))
        await asyncio.sleep(0)
        assert len(engine._dispatcher._admission.calls()) == 2
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(awaited())
    assert not engine._dispatcher._admission.calls()


# --- Rewards --------------------------------------------------------------------------------------------------------


def test_conversations_through_every_method(engines: Any) -> None:
    engine = engines("steps")
    talk = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": f"4{STEP} done{STEP}"}]
    items = [talk, f"as a text{STEP}"]
    expected = engine.reward(items)
    assert expected.rewards.lengths.tolist() == [2, 1]
    same(engine.encode(items, task="reward"), expected)
    same(engine.submit("reward", items).result(), expected)
    same(asyncio.run(AsyncEngine(engine).reward(items)), expected)
    same(asyncio.run(AsyncEngine(engine).submit("reward", items)), expected)
    with pytest.raises(InvalidRequestError, match="conversation at index 1"):
        engine.reward([talk, [{"role": "user", "content": "\ud800"}]])
    with pytest.raises(InvalidRequestError, match="conversation at index 0"):
        engine.reward([["no message"]])
    with pytest.raises(InvalidRequestError, match="needs a chat template"):
        engines("language").reward([talk], returned_token_ids=[1])


def test_steps_and_columns_of_a_request(engines: Any, folders: Any) -> None:
    engine, language = engines("steps"), engines("language")
    step = token_id(folders("steps"), STEP)
    texts = [f"one{STEP} two{STEP}", "none"]
    raw = engine.reward(texts)
    assert raw.rewards.lengths.tolist() == [2, 0]
    assert raw.rewards.flat.shape == (2, 2)
    same(engine.reward(texts, step_tag_id=step), raw)
    second = engine.reward(texts, returned_token_ids=[1]).rewards.flat
    np.testing.assert_allclose(second, raw.rewards.flat[:, 1:], atol=1e-6)
    shares = engine.reward(texts, activation=True).rewards.flat
    np.testing.assert_allclose(shares.sum(axis=1), 1, atol=1e-6)
    first, both = (language.reward(["a b c"], returned_token_ids=ids).rewards for ids in ([5], [9, 5]))
    np.testing.assert_allclose(both.flat[:, 1:], first.flat, atol=1e-5)
    for wrong, message in [
        ({"returned_token_ids": [2]}, "holds 2; the columns of .* run from 0 to 1"),
        ({"step_tag_id": 10**6}, "step_tag_id=1000000 is not a token"),
        ({"step_tag_id": -1}, "step_tag_id=-1 must be a token id"),
        ({"returned_token_ids": []}, "must hold token ids"),
    ]:
        with pytest.raises(InvalidRequestError, match=message):
            engine.reward(texts, **wrong)
    with pytest.raises(InvalidRequestError, match="holds 1000000; the columns of .* run from 0"):
        language.reward(["a"], returned_token_ids=[10**6])
    with pytest.raises(UnsupportedTaskError, match="or pass returned_token_ids"):
        language.reward(["a"])
    with pytest.raises(UnsupportedTaskError, match="not reward"):
        engines("embedder").reward(["a"], returned_token_ids=[1])
    with pytest.raises(InvalidRequestError, match="step_tag_id=5 means nothing to .*rewards whole texts"):
        engines("reranker").reward(["a"], step_tag_id=5)


# --- Sparse ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["splade", "m3"])
def test_sparse_weights(engines: Any, name: str) -> None:
    engine = engines(name)
    assert "sparse_embed" in engine.tasks
    found = engine.sparse_embed([*TEXTS, TEXTS[1]])
    for row in found:
        assert all(type(token) is int and type(weight) is float and weight > 0 for token, weight in row.items())
    assert any(len(row) for row in found)
    assert found[1] == pytest.approx(found[-1])
    if name == "m3":  # only a token of the text has a weight
        for text, row in zip(TEXTS, found, strict=False):
            assert set(row) <= set(engine.tokenize([text])[0])
    with pytest.raises(InvalidRequestError, match="activation=False means nothing to sparse_embed"):
        engine.encode(["a"], task="sparse_embed", params=PoolingParams(activation=False))


def test_the_tokens_of_a_classifier_may_be_those_of_a_step(engines: Any) -> None:
    """Its head computes logits of every token, though ``reward`` and ``classify`` read one row per text."""
    engine = engines("reranker")
    ids = engine.tokenize([SENTENCES[0]])[0]
    every = engine.encode([SENTENCES[0]], task="token_classify").probs[0]
    some = engine.encode([SENTENCES[0]], task="token_classify", params=PoolingParams(step_tag_id=ids[1])).probs[0]
    np.testing.assert_array_equal(some, every[[token == ids[1] for token in ids]])
    assert 0 < len(some) < len(every)
