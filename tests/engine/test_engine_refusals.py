"""What each task refuses: bare strings, what is no text or pair, other tasks' options, tasks that are not served."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.test_engine_tasks import CASES, LONG, SHORT_QUERY, TEXTS, WRITERS, each_case, pairs_of, rows
from tests.tiny import write_checkpoint
from tests.tiny.heads import write_cross_encoder, write_stanford
from tokenizers import Tokenizer

from millpond import AsyncEngine, Engine, PoolingParams
from millpond.errors import InputTooLongError, InvalidDimensionsError, InvalidRequestError, UnsupportedTaskError


@pytest.fixture
def engines(engine_of: Callable[..., Engine]) -> Callable[[str], Engine]:
    return lambda name: engine_of(WRITERS[name], hf_overrides={"is_matryoshka": True})


@each_case
def test_a_bare_string_is_a_type_error(engines: Any, name: str, task: Any, items: Any, options: Any) -> None:
    engine = engines(name)
    if task != "score":
        with pytest.raises(TypeError, match=rf"{task}\(\[text\]\)"):
            getattr(engine, task)("a bare text", **options)
        with pytest.raises(TypeError, match="bytes"):
            getattr(engine, task)(b"a bare text", **options)
        with pytest.raises(TypeError):
            asyncio.run(getattr(AsyncEngine(engine), task)("a bare text", **options))
    for wrong in ("a bare text", {"a": "b"}, 3, None):
        with pytest.raises(TypeError):
            engine.submit(task, wrong, PoolingParams(**options))
    with pytest.raises(TypeError, match="params is a dict"):
        engine.submit(task, items, {"role": "query"})


@each_case
def test_what_is_no_text_is_named(engines: Any, name: str, task: Any, items: Any, options: Any) -> None:
    engine, params = engines(name), PoolingParams(**options)
    for wrong in (3, None, b"a", "lone \udc00 half"):
        bad = ("a", wrong) if task == "score" else wrong
        with pytest.raises(InvalidRequestError, match="at index 1 "):
            engine.submit(task, [items[0], bad, items[0]], params)
    if task != "score":
        with pytest.raises(InvalidRequestError, match="at index 1"):
            engine.submit(task, [items[0], ("a", "pair")], params)


OPTIONS: dict[str, Any] = {
    "dimensions": 16,
    "normalize": True,
    "activation": True,
    "step_tag_id": 3,
    "returned_token_ids": (1,),
    "role": "query",
    "prompt": "p",
    "prompt_name": "query",
    "instruction": "find it",
    "aggregation": "first",
    "adapter": "separation",
    "long_texts": "mean",
    "output_dtype": "int8",
}
_TEXT = {"role", "prompt", "prompt_name", "adapter"}
_VECTORS = _TEXT | {"dimensions", "normalize"}
_LOGITS = {"activation"}
READ: dict[tuple[str, str], set[str]] = {
    ("embedder", "embed"): _VECTORS | {"output_dtype", "long_texts"},
    ("embedder", "token_embed"): _VECTORS,
    ("embedder", "score"): set(),
    ("colbert", "score"): set(),
    ("m3", "sparse_embed"): _TEXT,
    ("classifier", "classify"): _LOGITS | {"prompt", "prompt_name"},
    ("ner", "token_classify"): _LOGITS | {"aggregation", "step_tag_id", "returned_token_ids"},
    ("reranker", "score"): _LOGITS | {"instruction"},
    ("steps", "reward"): _LOGITS | {"step_tag_id", "returned_token_ids"},
}
ABSENT = {
    **{(name, task, "adapter"): "it has none" for name, task in READ},
    ("m3", "sparse_embed", "prompt_name"): "is not a prompt of",
    ("classifier", "classify", "prompt_name"): "is not a prompt of",
    ("reranker", "score", "instruction"): "has no place in this cross-encoder",
}


@pytest.mark.parametrize(("name", "task"), list(READ))
def test_a_task_reads_its_options_and_refuses_the_others(engines: Any, name: str, task: Any) -> None:
    assert PoolingParams(**{**OPTIONS, "prompt_name": None}).given() == OPTIONS.keys() - {"prompt_name"}
    engine, items = engines(name), pairs_of() if task == "score" else TEXTS
    together: dict[str, Any] = {}  # what the checkpoint has
    for option, value in OPTIONS.items():
        params = PoolingParams(**{option: value})
        if option not in READ[name, task]:
            with pytest.raises(InvalidRequestError, match=rf"^{option}=.* means nothing to "):
                engine.submit(task, items, params)
        elif (name, task, option) in ABSENT:  # the task reads it, but the checkpoint has no such thing
            with pytest.raises(InvalidRequestError, match=ABSENT[name, task, option]):
                engine.submit(task, items, params).result(timeout=30)
        elif option != "prompt_name":  # excludes prompt
            together[option] = value
    assert len(rows(engine.encode(items, task=task, params=PoolingParams(**together)))) == len(items)


def test_unknown_names_are_refused_with_the_known_ones(engines: Any) -> None:
    jina, embedder = engines("jina"), engines("embedder")
    for call, options, message in (
        (jina.embed, {"adapter": "poems"}, r"adapter='poems' is unknown to .*; it has retrieval.query, "),
        (embedder.token_embed, {"adapter": "poems"}, "adapter='poems' is unknown to .*; it has none"),
        (embedder.embed, {"prompt_name": "x"}, "prompt_name='x' is not a prompt of .*; it has document, query"),
        (embedder.encode, {"task": "poems"}, "task='poems' is unknown; choose one of embed"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            call(["a"], **options)
    with pytest.raises(InvalidRequestError, match="instruction holds a lone surrogate"):
        engines("reranker").rerank("q", ["d"], instruction="\ud800")


@pytest.mark.parametrize("name", list(WRITERS))
def test_a_task_that_is_not_served_is_refused_by_name(engines: Any, name: str) -> None:
    engine = engines(name)
    for task in {task for _, task, *_ in CASES} - engine.tasks:
        if task == "score" and engine.spec.score_type is not None:
            continue
        item: Any = ("q", "d") if task == "score" else "a"
        with pytest.raises(UnsupportedTaskError, match=f"serves .*, not {task}"):
            engine.encode([item], task=task)


@pytest.mark.parametrize(("name", "noun"), [("embedder", "document"), ("reranker", "pair"), ("colbert", "document")])
def test_pairs_that_are_too_long(engines: Any, name: str, noun: str) -> None:
    engine, documents = engines(name), ["a", "b", "a", LONG]
    cut = engine.score(SHORT_QUERY, documents)
    assert cut.truncated.tolist() == [False, False, False, True]
    with pytest.raises(InputTooLongError, match=f"the {noun} at index 3 has"):
        engine.score(SHORT_QUERY, documents, truncate="error")
    with pytest.raises(InputTooLongError, match=f"the {noun} at index 3 has"):
        engine.rerank(SHORT_QUERY, documents, truncate="error")
    noun = "query" if noun == "document" else noun
    if name != "colbert":  # all of its queries have one length
        with pytest.raises(InputTooLongError, match=f"the {noun} at index 2 has"):
            engine.score(["a", "b", LONG, "a"], ["a", "b", "c", "d"], truncate="error")


@pytest.mark.parametrize("name", ["embedder", "reranker", "colbert"])
def test_what_is_no_pair_is_refused(engines: Any, name: str) -> None:
    engine = engines(name)
    for call, message in [
        (lambda: engine.encode([("a", "b"), ["c", "d"]], task="score"), "index 1 is a list, not a .query, document."),
        (lambda: engine.encode(["a"], task="score"), r"score takes a \(query, document\) pair at index 0, not a str"),
        (lambda: engine.encode([("a", 3)], task="score"), "the document at index 0 is a int, not a str"),
        (lambda: engine.score(["a", None], ["c", "d"]), "the query at index 1 is a NoneType, not a str"),
        (lambda: engine.rerank("q", ["a", 3]), "the document at index 1 is a int, not a str"),
        (lambda: engine.rerank("q\udfff", ["a"]), r"the query at index 0 holds a lone surrogate \(U\+DFFF at 1\)"),
        (lambda: engine.score("q", ["a", "b\ud800"]), "the document at index 1 holds a lone surrogate"),
        (lambda: engine.encode([("a", "b")], task="score", params=PoolingParams(task="classify")), "contradicts"),
    ]:
        with pytest.raises(InvalidRequestError, match=message):
            call()
    for call in [
        lambda: engine.rerank("q", "one document"),
        lambda: engine.rerank("q", {"a": 1}),
        lambda: engine.rerank(["q"], ["a"]),
        lambda: engine.score(b"q", ["a"]),
        lambda: engine.score("q", {"a": 1}),
        lambda: engine.score(3, ["a"]),
        lambda: engine.encode("qd", task="score"),
    ]:
        with pytest.raises(TypeError):
            call()


@pytest.mark.parametrize(
    ("write", "limit", "special", "least"),
    [
        ("bert", 1, 2, 3),
        ("bert", 2, 2, 3),
        ("qwen3", 1, 1, 2),
        (write_cross_encoder, 4, 3, 5),
        (write_stanford, 3, 3, 4),
    ],
)
def test_a_limit_without_room_for_text_is_refused_at_loading(
    checkpoint_of: Any, write: Any, limit: int, special: int, least: int
) -> None:
    folder = checkpoint_of(write)
    with pytest.raises(
        InvalidRequestError, match=rf"max_length={limit} .*{special} special tokens; choose at least {least}"
    ):
        Engine(folder, max_length=limit)
    with Engine(folder, max_length=least, dtype="float32", device="cpu") as engine:
        assert engine.spec.max_length == least
        if engine.spec.score_type == "cross-encoder":
            assert engine.score("a river", ["a mill"]).truncated.all()
        else:
            assert engine.token_embed(["a river and a mill"]).truncated.all()


@pytest.mark.parametrize("task", ["embed", "token_embed"])
@pytest.mark.parametrize("overrides", [None, {"is_matryoshka": True}, {"matryoshka_dimensions": [16, 32]}])
def test_what_is_no_width_is_refused_by_every_kind_of_model(engine_of: Any, task: str, overrides: Any) -> None:
    engine = engine_of("bert", hf_overrides=overrides)
    for dimensions in (0, -3):
        with pytest.raises(InvalidDimensionsError, match=f"dimensions={dimensions} is no width; .*48") as raised:
            getattr(engine, task)(["a"], dimensions=dimensions)
        assert ("Matryoshka" in str(raised.value) or "force" in str(raised.value)) is False
    for more in (True, False, 16.0, "16"):
        with pytest.raises(InvalidDimensionsError, match=f"dimensions={more!r} must be an int"):
            getattr(engine, task)(["a"], dimensions=more)
    with pytest.raises(InvalidDimensionsError, match=r"dimensions=49 is more than .* has \(48\)"):
        getattr(engine, task)(["a"], dimensions=49)
    assert engine.stats().running_calls == 0


def test_a_token_behind_the_table_of_vectors_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "bert")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows = tokenizer.get_vocab_size()
    tokenizer.add_tokens(["<image>", "<audio>"])  # the weights were not resized with it
    tokenizer.save(str(folder / "tokenizer.json"))
    with Engine(folder, device="cpu") as engine:
        expected = engine.embed(TEXTS).embeddings
        for texts, token, number in (
            (["a mill", "a <audio> weir"], "<audio>", rows + 1),
            (["<image>"], "<image>", rows),
        ):
            message = (
                f"index {len(texts) - 1} has the token '{token}' with id {number}, .* the ids 0 to {rows - 1}; leave"
            )
            for call in (engine.embed, engine.token_embed):
                with pytest.raises(InvalidRequestError, match=message):
                    call(texts)
        assert np.array_equal(engine.embed(TEXTS).embeddings, expected)
