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
from tests.adapters import QUESTION, TEMPLATE
from tests.tiny import write_checkpoint
from tests.tiny.heads import write_cross_encoder, write_stanford

from langchain_millpond import MillpondCrossEncoder, MillpondReranker
from millpond import Engine
from millpond.errors import InputTooLongError, InvalidRequestError, ModelLoadError

PAIRS = [("a wheel", "the pond"), ("a wheel", ""), ("Ein Teich, 池", "une étang"), ("a wheel", "the pond")]

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


@pytest.mark.torch
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


@pytest.mark.parametrize("method", ["auto", "cosine", "maxsim"])
def test_a_method_is_the_engines_method_of_rerank(
    engine: Engine, compress: Compress, documents: list[Document], texts: list[str], method: Any
) -> None:
    expected = engine.rerank(QUESTION, texts, method=method)
    reranker = MillpondReranker(engine=engine, top_n=None, method=method)
    found = compress(reranker, documents)
    assert [document.metadata["n"] for document in found] == [result.index for result in expected]
    np.testing.assert_allclose(scores_of(found), [result.relevance_score for result in expected], atol=1e-4)
    assert found[0].page_content.startswith("Bread rises")
    scores = MillpondCrossEncoder(engine=engine, method=method).score([(QUESTION, text) for text in texts])
    by_index = sorted((result.index, result.relevance_score) for result in expected)
    np.testing.assert_allclose(scores, [score for _, score in by_index], atol=1e-4)
    assert (max(scores) > 1.1) is (method != "cosine")  # the two measures differ


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


def test_how_many_are_kept(engine: Engine, compress: Compress, documents: list[Document]) -> None:
    whole = compress(MillpondReranker(engine=engine, top_n=None), documents)
    assert len(whole) == len(documents)
    assert compress(MillpondReranker(engine=engine, top_n=2), documents) == whole[:2]
    assert compress(MillpondReranker(engine=engine, top_n=99), (one for one in documents)) == whole
    threshold = scores_of(whole)[4]
    assert compress(MillpondReranker(engine=engine, top_n=None, score_threshold=threshold), documents) == whole[:5]
    assert compress(MillpondReranker(engine=engine, top_n=2, score_threshold=threshold), documents) == whole[:2]
    assert compress(MillpondReranker(engine=engine, score_threshold=1e9), documents) == []
    for top_n in (0, True, "3"):
        with pytest.raises(ValidationError, match="top_n"):
            MillpondReranker(model="a", top_n=top_n)


def test_within_a_budget_documents_may_have_no_score(
    engine: Engine, compress: Compress, documents: list[Document]
) -> None:
    none = compress(MillpondReranker(engine=engine, top_n=2, budget_ms=1e-9), documents)
    assert [each.id for each in none] == ["id-0", "id-1"] and scores_of(none) == [None, None]
    assert compress(MillpondReranker(engine=engine, budget_ms=1e-9, score_threshold=-1e9), documents) == []
    every = compress(MillpondReranker(engine=engine, top_n=None, budget_ms=3.6e6), documents)
    whole = compress(MillpondReranker(engine=engine, top_n=None), documents)
    np.testing.assert_allclose(scores_of(every), scores_of(whole), rtol=1e-4)
    for wrong in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ValidationError, match="budget_ms"):
            MillpondReranker(engine=engine, budget_ms=wrong)
    with pytest.raises(ValidationError, match="budget_ms"):
        MillpondCrossEncoder(engine=engine, budget_ms=5)


def test_no_documents_no_model(compress: Compress) -> None:
    absent = MillpondReranker(model="./no-such-folder")
    assert compress(absent, []) == []
    with pytest.raises(ModelLoadError, match="no-such-folder"):
        compress(absent, [Document(page_content="a")])


def test_options_reach_the_engine(cross_encoder: str, compress: Compress, documents: list[Document]) -> None:
    options: dict[str, Any] = {"model": cross_encoder, "dtype": "float32"}
    pairs = [(QUESTION, document.page_content) for document in documents]

    def best(**more: Any) -> list[float]:
        """The scores of the reranker, which are the best of the cross-encoder."""
        scores = MillpondCrossEncoder(**options, **more).score(pairs)
        found = scores_of(compress(MillpondReranker(**options, **more), documents))
        np.testing.assert_allclose(found, np.sort(scores)[::-1][:3], atol=1e-5)
        return found

    np.testing.assert_allclose(best(activation="sigmoid"), 1 / (1 + np.exp(-np.array(best()))), atol=1e-5)
    template = {"score_template": TEMPLATE}
    assert best(instruction="wheel", **template) == pytest.approx(best(**template), abs=1e-5)
    assert best(instruction="tides", **template) != pytest.approx(best(**template), abs=1e-3)
    with pytest.raises(InputTooLongError, match="max_length=9"):
        MillpondCrossEncoder(**options, max_length=9, truncate="error").score(pairs)
    for call in (
        lambda: compress(MillpondReranker(**options, instruction="be kind"), documents),
        lambda: MillpondCrossEncoder(**options, instruction="be kind").score([("a", "b")]),
    ):
        with pytest.raises(InvalidRequestError, match="instruction='be kind'"):  # no slot
            call()


@pytest.mark.parametrize(
    ("query", "message"), [(None, "one query, a str"), (["a"], "one query, a str"), ("\ud800", "lone surrogate")]
)
def test_bad_queries_are_named(engine: Engine, compress: Compress, query: Any, message: str) -> None:
    with pytest.raises((TypeError, InvalidRequestError), match=message):
        compress(MillpondReranker(engine=engine), [Document(page_content="a")], query)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ("a text", "takes a list of documents, not a str"),
        (Document(page_content="a text"), "takes a list of documents, not a Document"),
        (["a text"], "the document at index 0 is a str"),
    ],
    ids=["str", "document", "texts"],
)
def test_what_is_no_list_of_documents_is_a_type_error(compress: Compress, documents: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        compress(MillpondReranker(model="not/loaded"), documents)


# Pairs: any sequence of two texts


@pytest.fixture(params=["cross_encoder_engine", "engine"])
def scorer(request: pytest.FixtureRequest) -> MillpondCrossEncoder:
    return MillpondCrossEncoder(engine=request.getfixturevalue(request.param))


@pytest.mark.parametrize(
    "kind",
    [
        lambda pairs: [pairs[0], *(list(pair) for pair in pairs[1:])],
        np.array,
        lambda pairs: zip(*map(list, zip(*pairs, strict=True)), strict=True),
    ],
    ids=["mixed", "array", "zip"],
)
def test_pairs_may_be_any_sequences_of_two(scorer: MillpondCrossEncoder, kind: Any) -> None:
    scores = scorer.score(kind(PAIRS))
    np.testing.assert_allclose(scores, scorer.score(PAIRS), atol=1e-5)
    assert {type(score) for score in scores} == {float}
    assert scores[0] == pytest.approx(scores[3], abs=1e-5)
    assert scorer.score([]) == []


@pytest.mark.parametrize(
    ("pairs", "error", "message"),
    [
        ("ab", TypeError, r"not a str; write score\(\[\(query, document\)\]\)"),
        ({"a": "b"}, TypeError, "not a dict"),
        (("a", "b"), InvalidRequestError, "index 0"),
        ([("a", "b"), ("a", "b", "c")], InvalidRequestError, "index 1 is a tuple, not a .query, document. tuple"),
        ([("a", "b"), ["a", None]], InvalidRequestError, "document at index 1 is a NoneType"),
        ([("a", "b"), 7], InvalidRequestError, "index 1 is a int"),
        ([("a", "\ud800")], InvalidRequestError, "lone surrogate"),
    ],
    ids=["str", "dict", "one-pair", "three", "none", "int", "surrogate"],
)
def test_what_is_no_pair_is_named(
    scorer: MillpondCrossEncoder, pairs: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        scorer.score(pairs)


# What a reranker over an embedding checkpoint says once: what it computes by default


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "MaxSim" in record.getMessage()]


@pytest.mark.parametrize("call", ["rerank", "arerank", "score"])
def test_an_embedder_reranks_by_maxsim_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    model, two = str(write_checkpoint(tmp_path / "model")), [Document(page_content="a"), Document(page_content="b")]
    calls: dict[str, Any] = {
        "rerank": lambda: MillpondReranker(model=model).compress_documents(two, "wheel"),
        "arerank": lambda: asyncio.run(MillpondReranker(model=model).acompress_documents(two, "wheel")),
        "score": lambda: MillpondCrossEncoder(model=model).score([("wheel", "the pond")]),
    }
    for method in ("cosine", "maxsim"):  # who names the method is told nothing
        MillpondReranker(model=model, method=method).compress_documents(two, "wheel")
    assert said(caplog) == []
    calls[call]()
    (line,) = said(caplog)
    assert all(part in line for part in (model, 'method="maxsim"', 'method="cosine"'))
    for other in calls.values():
        other()
    assert len(said(caplog)) == 1


@pytest.mark.parametrize("write", [write_cross_encoder, write_stanford], ids=["cross-encoder", "colbert"])
def test_a_model_that_was_trained_to_rerank_is_told_nothing_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, write: Any
) -> None:
    MillpondReranker(model=str(write(tmp_path / "model"))).compress_documents([Document(page_content="a")], "wheel")
    assert said(caplog) == []
