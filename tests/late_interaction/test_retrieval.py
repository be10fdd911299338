"""Candidates of several searches, fused by their ranks, and scored by MaxSim."""

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from millpond import TokenEmbeddingOutput, Usage
from millpond.errors import InvalidRequestError
from millpond.late_interaction import MemoryIndex, Ragged
from millpond.late_interaction.retrieval import aretrieve, retrieve


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


def test_rankings_are_fused_by_reciprocal_ranks(index):
    """With one candidate to score, the hit is the best of the fused ranking, whatever MaxSim says of the others."""
    for rankings, weights, best in (
        ([["zeta", "cab"], ["zeta"]], None, "zeta"),
        ([["bad"], ["cab"]], None, "bad"),  # of equal scores the id that was seen first
        ([["bad"], ["cab"]], [1, 2], "cab"),
        ([["zeta", "zeta", "cab"], ["bad", "cab"]], None, "cab"),  # an id counts once in a ranking
    ):
        sources = [lambda query, limit, found=found: found for found in rankings]
        assert ids(retrieve(index, "abcd", k=1, candidates=1, sources=sources, weights=weights)) == [best]


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


def test_candidates_that_the_index_does_not_have_are_logged_once(index, caplog):
    for _ in range(3):
        assert retrieve(index, "abcd", sources=[lambda q, n: ["other-1", "other-2"]]) == []
    assert retrieve(index, "abcd", sources=[lambda q, n: []]) == []
    assert caplog.text.count("none of 2 candidates is in the index (the first is 'other-1')") == 1


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
        ({"sources": ["index"], "weights": [1, 2]}, InvalidRequestError, "must be 1 numbers"),
        ({"sources": ["index"], "weights": [float("nan")]}, InvalidRequestError, "from 0"),
        ({"sources": ["index"], "weights": [-1]}, InvalidRequestError, "from 0"),
        ({"weights": [1]}, InvalidRequestError, "require sources"),
        ({"sources": [lambda q, n: "a"]}, TypeError, "return a list of ids"),
        ({"sources": [lambda q, n: [1]]}, TypeError, "the id 1"),
        ({"query": " "}, InvalidRequestError, "blank"),
    ],
    ids=range(15),
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
