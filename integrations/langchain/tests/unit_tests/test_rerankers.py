"""MillpondReranker and MillpondCrossEncoder: the engine's scores, in LangChain's types."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.documents import Document
from pydantic import ValidationError
from tests.gates import LoopGate, batches_held, batches_through, until_set
from tests.tiny.heads import write_stanford

from langchain_millpond import MillpondCrossEncoder, MillpondReranker
from millpond import Engine
from millpond.engine.composite import comparison
from millpond.errors import InputTooLongError, InvalidRequestError, ModelLoadError

QUESTION = "What makes dough rise?"
TEMPLATE = (
    "{{ instruction or 'wheel' }} "
    "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }} "
    "{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}"
)

Compress = Callable[..., list[Document]]


@pytest.fixture(params=["sync", "async"])
def compress(request: pytest.FixtureRequest) -> Compress:
    """The sync and the async method of the reranker."""

    def call(reranker: MillpondReranker, documents: Any, query: Any = QUESTION) -> list[Document]:
        if request.param == "sync":
            return reranker.compress_documents(documents, query)
        return asyncio.run(reranker.acompress_documents(documents, query))

    return call


@pytest.fixture
def documents(texts: list[str]) -> list[Document]:
    return [Document(id=f"id-{i}", page_content=text, metadata={"n": i, "deep": [i]}) for i, text in enumerate(texts)]


def scores_of(documents: list[Document]) -> list[float]:
    return [document.metadata["relevance_score"] for document in documents]


def logits(folder: str, pairs: list[tuple[str, str]]) -> list[float]:
    """The reference: transformers, one pair at a time."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return [model(**tokenizer(*pair, truncation=True, return_tensors="pt")).logits.item() for pair in pairs]


def test_a_cross_encoder_scores_as_transformers_does(
    cross_encoder: str, compress: Compress, documents: list[Document]
) -> None:
    reranker = MillpondReranker(model=cross_encoder, dtype="float32", top_n=None)
    pairs = [(QUESTION, document.page_content) for document in documents]
    expected = np.array(logits(cross_encoder, pairs))
    found = compress(reranker, documents)
    order = np.argsort(-expected)
    assert [document.metadata["n"] for document in found] == order.tolist() != list(range(len(documents)))
    np.testing.assert_allclose(scores_of(found), expected[order], rtol=1e-4, atol=1e-5)
    assert np.ptp(expected) > 0.1  # the scores differ enough to have an order
    scores = MillpondCrossEncoder(model=cross_encoder, dtype="float32").score(pairs)
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)
    turned = MillpondCrossEncoder(model=cross_encoder, dtype="float32").score([(b, a) for a, b in pairs])
    assert np.abs(np.array(turned) - expected).max() > 0.1  # swapping query and document changes the score


def test_an_embedding_checkpoint_scores_by_its_token_states(
    engine: Engine, compress: Compress, documents: list[Document], texts: list[str]
) -> None:
    expected = engine.rerank(QUESTION, texts, method="maxsim")
    found = compress(MillpondReranker(engine=engine, top_n=None), documents)
    assert [document.metadata["n"] for document in found] == [result.index for result in expected]
    np.testing.assert_allclose(scores_of(found), [result.relevance_score for result in expected], atol=1e-4)
    assert found[0].page_content.startswith("Bread rises")
    by_index = sorted((result.index, result.relevance_score) for result in expected)
    scores = MillpondCrossEncoder(engine=engine).score([(QUESTION, text) for text in texts])
    np.testing.assert_allclose(scores, [score for _, score in by_index], atol=1e-4)
    assert max(scores) > 1.1  # so it is not a cosine


@pytest.mark.parametrize("method", ["auto", "cosine", "maxsim"])
def test_a_method_is_the_engines_method_of_rerank(
    engine: Engine, compress: Compress, documents: list[Document], texts: list[str], method: Any
) -> None:
    expected = engine.rerank(QUESTION, texts, method=method)
    reranker = MillpondReranker(engine=engine, top_n=None, method=method)
    found = compress(reranker, documents)
    assert [document.metadata["n"] for document in found] == [result.index for result in expected]
    np.testing.assert_allclose(scores_of(found), [result.relevance_score for result in expected], atol=1e-4)
    scores = MillpondCrossEncoder(engine=engine, method=method).score([(QUESTION, text) for text in texts])
    assert max(scores) == pytest.approx(expected[0].relevance_score, abs=1e-4)
    assert (max(scores) > 1.1) is (method != "cosine")  # the two measures differ
    assert f"method='{method}'" in repr(reranker)
    assert reranker.model_dump()["method"] == method


def test_a_late_interaction_checkpoint_scores_as_it_was_trained_to(
    tmp_path: Path, compress: Compress, documents: list[Document], texts: list[str]
) -> None:
    folder = write_stanford(tmp_path / "colbert")
    found = compress(MillpondReranker(model=folder, dtype="float32", top_n=None), documents)
    with Engine(folder, dtype="float32") as colbert:
        expected = colbert.rerank(QUESTION, texts)
    assert [document.metadata["n"] for document in found] == [result.index for result in expected]
    np.testing.assert_allclose(scores_of(found), [result.relevance_score for result in expected], atol=1e-4)


def test_the_callers_documents_are_left_alone(engine: Engine, compress: Compress, documents: list[Document]) -> None:
    before = copy.deepcopy(documents)
    found = compress(MillpondReranker(engine=engine), tuple(documents))
    assert documents == before
    assert len(found) == 3
    for document in found:
        original = documents[document.metadata["n"]]
        assert (document.id, document.page_content) == (original.id, original.page_content)
        assert document.metadata == {**original.metadata, "relevance_score": document.metadata["relevance_score"]}
        assert type(document.metadata["relevance_score"]) is float
    assert {type(score) for score in MillpondCrossEncoder(engine=engine).score([("a", "b")])} == {float}


def test_how_many_are_kept(engine: Engine, compress: Compress, documents: list[Document]) -> None:
    whole = compress(MillpondReranker(engine=engine, top_n=None), documents)
    assert len(whole) == len(documents)
    assert compress(MillpondReranker(engine=engine, top_n=2), documents) == whole[:2]
    assert compress(MillpondReranker(engine=engine, top_n=99), documents) == whole
    threshold = scores_of(whole)[4]
    assert compress(MillpondReranker(engine=engine, top_n=None, score_threshold=threshold), documents) == whole[:5]
    assert compress(MillpondReranker(engine=engine, top_n=2, score_threshold=threshold), documents) == whole[:2]
    assert compress(MillpondReranker(engine=engine, score_threshold=1e9), documents) == []


def test_no_documents_no_model(compress: Compress) -> None:
    absent = MillpondReranker(model="./no-such-folder")
    assert compress(absent, []) == []
    with pytest.raises(ModelLoadError, match="no-such-folder"):
        compress(absent, [Document(page_content="a")])


def test_no_pairs_no_scores(engine: Engine, cross_encoder: str) -> None:
    assert MillpondCrossEncoder(engine=engine).score([]) == []
    assert MillpondCrossEncoder(model=cross_encoder, dtype="float32").score([]) == []


def test_options_reach_the_engine(cross_encoder: str, documents: list[Document], texts: list[str]) -> None:
    options: dict[str, Any] = {"model": cross_encoder, "dtype": "float32"}
    pairs = [(QUESTION, text) for text in texts]
    raw = np.array(MillpondCrossEncoder(**options).score(pairs))
    squashed = MillpondCrossEncoder(**options, activation="sigmoid").score(pairs)
    np.testing.assert_allclose(squashed, 1 / (1 + np.exp(-raw)), atol=1e-5)
    best = MillpondReranker(**options, activation="sigmoid").compress_documents(documents, QUESTION)
    np.testing.assert_allclose(scores_of(best), np.sort(squashed)[::-1][:3], atol=1e-5)
    with pytest.raises(InputTooLongError, match="max_length=9"):
        MillpondReranker(**options, max_length=9, truncate="error").compress_documents(documents, QUESTION)
    with pytest.raises(InputTooLongError, match="max_length=9"):
        MillpondCrossEncoder(**options, max_length=9, truncate="error").score(pairs)
    long = [(QUESTION, "wheel " * 30 + "pond")]
    end = MillpondCrossEncoder(**options, max_length=12).score(long)
    assert end != MillpondCrossEncoder(**options, max_length=12, truncate="start").score(long)


def test_an_instruction_fills_the_templates_slot(
    cross_encoder: str, compress: Compress, documents: list[Document]
) -> None:
    def best(**options: Any) -> list[float]:
        reranker = MillpondReranker(model=cross_encoder, dtype="float32", score_template=TEMPLATE, **options)
        pairs = [(QUESTION, document.page_content) for document in documents]
        scores = MillpondCrossEncoder(model=cross_encoder, dtype="float32", score_template=TEMPLATE, **options).score(
            pairs
        )
        found = scores_of(compress(reranker, documents))
        np.testing.assert_allclose(found, np.sort(scores)[::-1][:3], atol=1e-5)
        return found

    assert best(instruction="wheel") == pytest.approx(best(), abs=1e-5)
    assert best(instruction="tides") != pytest.approx(best(), abs=1e-3)


@pytest.mark.parametrize("model", ["minilm", "cross_encoder"])
def test_an_instruction_without_a_slot_is_refused(
    request: pytest.FixtureRequest, compress: Compress, documents: list[Document], model: str
) -> None:
    options: dict[str, Any] = {"model": request.getfixturevalue(model), "dtype": "float32", "instruction": "be kind"}
    with pytest.raises(InvalidRequestError, match="instruction='be kind'"):
        compress(MillpondReranker(**options), documents)
    with pytest.raises(InvalidRequestError, match="instruction='be kind'"):
        MillpondCrossEncoder(**options).score([("a", "b")])


@pytest.mark.parametrize(
    ("query", "message"), [(None, "one query, a str"), (["a"], "one query, a str"), ("\ud800", "lone surrogate")]
)
def test_bad_queries_are_named(engine: Engine, compress: Compress, query: Any, message: str) -> None:
    with pytest.raises((TypeError, InvalidRequestError), match=message):
        compress(MillpondReranker(engine=engine), [Document(page_content="a")], query)


@pytest.mark.parametrize(
    ("pairs", "error"), [("ab", TypeError), ([("a", None)], InvalidRequestError), (["ab"], InvalidRequestError)]
)
def test_bad_pairs_are_refused(engine: Engine, cross_encoder: str, pairs: Any, error: type[Exception]) -> None:
    for adapter in (MillpondCrossEncoder(engine=engine), MillpondCrossEncoder(model=cross_encoder, dtype="float32")):
        with pytest.raises(error):
            adapter.score(pairs)


@pytest.mark.parametrize("top_n", [0, -1, True, "3"])
def test_a_number_of_documents_is_one(top_n: Any) -> None:
    with pytest.raises(ValidationError, match="top_n"):
        MillpondReranker(model="a", top_n=top_n)


@pytest.mark.parametrize(("model", "count"), [("minilm", 40), ("cross_encoder", 300)])
async def test_async_neither_blocks_the_loop_nor_takes_a_thread(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, model: str, count: int
) -> None:
    reranker = MillpondReranker(model=request.getfixturevalue(model), dtype="float32", top_n=None)
    many = [Document(page_content=f"the {i}th passage, about {i * i} things " * 4) for i in range(count)]
    await reranker.acompress_documents(many[:1], QUESTION)  # loads the model

    def refuse(*_: object) -> None:
        raise AssertionError("the adapter took a thread of the loop's pool")

    monkeypatch.setattr(asyncio.get_running_loop(), "run_in_executor", refuse)

    async def blocks() -> list[Document]:
        return reranker.compress_documents(many, QUESTION)

    for call, gate in ((reranker.acompress_documents(many, QUESTION), LoopGate()), (blocks(), LoopGate(seconds=0.2))):
        with batches_through(gate, reranker._engine()), monkeypatch.context() as patch:
            patch.setattr(comparison, "maxsim", gate.hold(comparison.maxsim))
            assert len(await gate.run(call)) == count
        assert {"run", "start"} & set(gate.calls)
        assert ("maxsim" in gate.calls) is (model == "minilm")
        assert gate.blocked is (call.__name__ == "blocks")  # the gate detects a blocked loop


async def test_a_cancelled_call_leaves_the_engine_working(engine: Engine, documents: list[Document]) -> None:
    reranker = MillpondReranker(engine=engine)
    many = [Document(page_content=f"the {i}th passage, about {i * i} things") for i in range(1000)]
    with batches_held(engine) as due:
        call = asyncio.ensure_future(reranker.acompress_documents(many, QUESTION))
        await until_set(due)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    found = await reranker.acompress_documents(documents, QUESTION)
    assert found[0].page_content.startswith("Bread rises")


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ("a text", "takes a list of documents, not a str"),
        (Document(page_content="a text"), "takes a list of documents, not a Document"),
        (["a text"], "the document at index 0 is a str"),
    ],
    ids=["str", "document", "texts"],
)
async def test_what_is_no_list_of_documents_is_a_type_error(documents: Any, message: str) -> None:
    reranker = MillpondReranker(model="not/loaded")
    with pytest.raises(TypeError, match=message):
        reranker.compress_documents(documents, "a question")
    with pytest.raises(TypeError, match=message):
        await reranker.acompress_documents(documents, "a question")


def test_any_iterable_of_documents_is_reranked(cross_encoder: str) -> None:
    documents = [Document(page_content="a wheel"), Document(page_content="a mill")]
    reranker = MillpondReranker(model=cross_encoder)
    found = reranker.compress_documents((one for one in documents), "a question")  # type: ignore[arg-type]
    assert found == reranker.compress_documents(documents, "a question")
