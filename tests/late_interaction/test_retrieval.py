"""Candidates of several searches, fused by their ranks, and scored by MaxSim."""

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from millpond import TokenEmbeddingOutput, Usage
from millpond.errors import InvalidRequestError
from millpond.late_interaction import MemoryIndex, Ragged
from millpond.late_interaction.retrieval import aretrieve, reciprocal_rank_fusion, retrieve


class OneHot:
    """An engine whose token vectors are one-hot: the letters of a text, so MaxSim counts the letters in common."""

    spec = SimpleNamespace(name="one-hot", tasks=frozenset({"token_embed"}), fingerprint="f" * 64, settings={})

    def token_embed(self, texts, *, role=None, normalize=None):
        matrices = [np.eye(26, dtype=np.float32)[[ord(letter) - 97 for letter in text]] for text in texts]
        rows = Ragged.from_matrices(matrices, width=26)
        return TokenEmbeddingOutput(
            embeddings=rows, truncated=np.zeros(len(texts), dtype=np.bool_), usage=Usage(prompt_tokens=len(rows.flat))
        )


WORDS = ["cab", "abbey", "dance", "zeta", "fjord", "bad"]


@pytest.fixture
def index():
    index = MemoryIndex(OneHot(), "float32")
    index.add(WORDS, WORDS, [{"n": n} for n in range(len(WORDS))])
    return index


def ids(hits):
    return [hit.id for hit in hits]


def test_fusion_adds_reciprocal_ranks():
    fused = reciprocal_rank_fusion([["a", "b", "c"], ["c", "a"]])
    assert fused == [("a", 1 / 61 + 1 / 62), ("c", 1 / 63 + 1 / 61), ("b", 1 / 62)]


def test_of_equal_scores_the_id_seen_first_comes_first():
    assert [id for id, _ in reciprocal_rank_fusion([["b"], ["a"]])] == ["b", "a"]


def test_an_id_counts_once_in_a_ranking():
    assert dict(reciprocal_rank_fusion([["a", "a", "b"]])) == {"a": 1 / 61, "b": 1 / 62}


def test_weights_scale_a_ranking():
    assert [id for id, _ in reciprocal_rank_fusion([["a"], ["b"]], weights=[1, 2])] == ["b", "a"]


@pytest.mark.parametrize("weights", [[1], [1, -1], [1, float("nan")]], ids=str)
def test_weights_that_do_not_fit_are_refused(weights):
    with pytest.raises(InvalidRequestError, match="weights"):
        reciprocal_rank_fusion([["a"], ["b"]], weights=weights)


def test_without_sources_the_index_is_searched(index):
    assert retrieve(index, "abc", k=3) == index.search(["abc"], k=3)[0]


def test_maxsim_sorts_the_candidates_of_a_function(index):
    asked = []

    def source(query, limit):
        asked.append((query, limit))
        return ["zeta", "bad", "unknown"]

    hits = retrieve(index, "abcd", k=5, sources=[source])
    assert [(hit.id, hit.score) for hit in hits] == [("bad", 3.0), ("zeta", 1.0)]
    assert asked == [("abcd", 100)]


def test_the_best_of_the_fused_ranking_are_scored(index):
    hits = retrieve(index, "abcd", k=1, candidates=1, sources=[lambda q, n: ["zeta", "cab"], lambda q, n: ["zeta"]])
    assert ids(hits) == ["zeta"]  # first of both rankings, so the only candidate, though cab matches better


@pytest.mark.parametrize("name", ["index", "exact"])
def test_the_index_itself_is_a_source(index, name):
    assert set(ids(retrieve(index, "abcd", k=4, sources=[name, lambda q, n: []]))) == {"cab", "bad", "abbey", "dance"}


def test_a_filter_holds_for_every_source(index):
    hits = retrieve(index, "abcd", k=5, sources=["index", lambda q, n: ["bad", "cab"]], filter={"n": [0, 2]})
    assert ids(hits) == ["cab", "dance"]


def test_candidates_that_cannot_be_hits_take_no_places(index):
    many = [lambda q, n: [f"unknown-{i}" for i in range(50)] + ["bad", "cab"]]
    assert ids(retrieve(index, "abcd", k=2, candidates=2, sources=many)) == ["cab", "bad"]
    filtered = [lambda q, n: ["bad", "cab", "abbey", "dance"]]
    assert ids(retrieve(index, "abcd", k=1, candidates=1, sources=filtered, filter={"n": 2})) == ["dance"]


def test_no_candidates_are_no_hits(index):
    assert retrieve(index, "abcd", sources=[lambda q, n: []]) == []


def test_candidates_that_the_index_does_not_have_are_logged(index, caplog):
    assert retrieve(index, "abcd", sources=[lambda q, n: ["other-1", "other-2"]]) == []
    assert "none of 2 candidates is in the index (the first is 'other-1')" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"query": ["a"]}, TypeError, "pass one str"),
        ({"k": 0}, InvalidRequestError, "k=0"),
        ({"k": True}, InvalidRequestError, "k=True"),
        ({"sources": []}, InvalidRequestError, "sources=\\[\\]"),
        ({"sources": "index"}, TypeError, "pass a list"),
        ({"sources": ["bm25"]}, TypeError, "'bm25' is not a source"),
        ({"sources": ["index"], "exact": True}, InvalidRequestError, "exact=True"),
        ({"sources": ["index"], "candidates": 3, "k": 4}, InvalidRequestError, "candidates=3"),
        ({"sources": ["index"], "weights": [1, 2]}, InvalidRequestError, "2 weights for 1"),
        ({"weights": [1]}, InvalidRequestError, "require sources"),
        ({"sources": [lambda q, n: "a"]}, TypeError, "return a list of ids"),
        ({"sources": [lambda q, n: [1]]}, TypeError, "the id 1"),
        ({"query": " "}, InvalidRequestError, "blank"),
    ],
    ids=range(13),
)
def test_bad_arguments_are_refused(index, arguments, error, words):
    arguments = {"query": "abc", **arguments}
    with pytest.raises(error, match=words):
        retrieve(index, arguments.pop("query"), **arguments)


def test_an_asynchronous_source_needs_the_asynchronous_function(index):
    async def source(query, limit):
        return ["bad"]

    with pytest.raises(InvalidRequestError, match="await aretrieve"):
        retrieve(index, "abcd", sources=[source])
    assert ids(asyncio.run(aretrieve(index, "abcd", sources=[source]))) == ["bad"]


def test_sources_are_asked_at_the_same_time(index):
    both = threading.Barrier(2, timeout=30)  # broken, and an error, unless both are inside at once

    def source(query, limit):
        both.wait()
        return ["bad"]

    assert ids(asyncio.run(aretrieve(index, "abcd", sources=[source, source]))) == ["bad"]


def test_both_functions_agree(index):
    for options in ({}, {"sources": ["index", lambda q, n: ["zeta"]]}, {"filter": {"n": 1}}, {"exact": True}):
        assert asyncio.run(aretrieve(index, "abcd", k=3, **options)) == retrieve(index, "abcd", k=3, **options)
