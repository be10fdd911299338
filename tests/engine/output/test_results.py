"""Results put together: entities, spans, windows, and MaxSim of matrices that arrive in any order."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiny import SENTENCES, TEXTS, write_checkpoint

from millpond import AsyncEngine, Engine, Entity, Pair
from millpond.engine.composite.comparison import Comparison
from millpond.engine.composite.windows import weighted_mean, windows
from millpond.engine.output.entities import entities
from millpond.engine.output.spans import span_rows
from millpond.engine.schedule.call import Call
from millpond.engine.tokenize.tokenized import TokenAlignment
from millpond.errors import InvalidRequestError
from millpond.tasks import AGGREGATIONS, Aggregation, Role

pytestmark = pytest.mark.filterwarnings("ignore:Tokenizer does not support real words:UserWarning")
LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC")
CASES = ("bert", "bert, case folded", "roberta", "modernbert", "xlm-roberta", "llama")


HARD = (
    "",
    " ",
    "\n\t",
    "a",
    ".",
    "...",
    "[SEP] [UNK] <s> <unk> </s>",
    "don't, won't -- can't!",
    "New York-based O'Neill (U.S.) e-mailed someone@example.org",
    "  leading,  double  and trailing spaces  ",
    "Zürich, São Paulo, Ångström, naïve café",
    "decomposed: e\u0301tang, A\u030angstro\u0308m, n\u0303",
    "池はとても静かです。水车在转动。",
    "Мельница над рекой",
    "İstanbul and ŒUVRE, ﬁsh",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈 at the 🌊",
    "zero\u200bwidth and no\u00a0break, soft\u00adhyphen, nul\x00l",
    "http://t.co/x?y=1&z=2 #mill @pond",
    "UPPER lower MiXeD 1824 3.14 1,000",
)


def same(ours: Sequence[Entity], theirs: Sequence[dict[str, Any]]) -> bool:
    return len(ours) == len(theirs) and all(
        one.label == other.get("entity_group", other.get("entity"))
        and abs(one.score - other["score"]) <= 1e-5
        and (one.start, one.end) == (other["start"], other["end"])
        for one, other in zip(ours, theirs, strict=True)
    )


def tagger(folder: Path, case: str) -> Any:
    """transformers' pipeline over a tiny checkpoint whose head is random."""
    import torch
    from transformers import AutoModelForTokenClassification, AutoTokenizer, TokenClassificationPipeline

    family, _, folded = case.partition(", ")
    write_checkpoint(folder, family, lowercase=bool(folded))
    names = dict(enumerate(LABELS))
    with torch.random.fork_rng():
        torch.manual_seed(1)  # what the checkpoint lacks, as the dense layer of ModernBERT's head, is random
        model = AutoModelForTokenClassification.from_pretrained(
            folder, id2label=names, label2id={label: i for i, label in names.items()}
        )
    head = model.get_submodule("score" if hasattr(model, "score") else "classifier")
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator) * 0.6)
        head.bias.copy_(torch.tensor([0.5, 0.0, 0.5, 0.0, 0.5, 0.0]))  # so that neighbours agree more often
    model.save_pretrained(folder)
    return TokenClassificationPipeline(model=model.eval(), tokenizer=AutoTokenizer.from_pretrained(folder))


@pytest.mark.torch
@pytest.mark.parametrize(
    "case", [name if name in ("bert", "roberta") else pytest.param(name, marks=pytest.mark.contract) for name in CASES]
)
def test_entities_equal_transformers(case: str, tmp_path: Path):
    import torch

    pipeline = tagger(tmp_path / "model", case)
    texts = [*HARD, *TEXTS, *SENTENCES]
    prepared = [list(pipeline.preprocess(text, is_split_into_words=False)) for text in texts]
    with torch.inference_mode():
        outputs = [[pipeline._forward(inputs) for inputs in each] for each in prepared]
    with Engine(tmp_path / "model", dtype="float32", device="cpu") as engine:
        for aggregation in AGGREGATIONS:
            chosen = pipeline._sanitize_parameters(
                aggregation_strategy=aggregation, ignore_labels=[] if aggregation == "none" else None
            )[2]
            output = engine.token_classify(texts, aggregation=aggregation)
            expected = [pipeline.postprocess([dict(part) for part in each], **chosen) for each in outputs]
            for text, ours, theirs in zip(texts, output, expected, strict=True):
                assert same(ours, theirs), (aggregation, text, ours, theirs)
                assert all(one.text == text[one.start : one.end] for one in ours)
                assert all(type(one.score) is float and type(one.start) is int for one in ours)
            assert sum(map(len, expected)) > 50 and output.labels == LABELS
        assert any(output.truncated) and not all(output.truncated)


def by_hand(tokens: Sequence[tuple[str, str, float]], aggregation: Aggregation) -> list[tuple[str, float, str]]:
    """Entities of tokens ``(text, label, score)``; one that begins with ``##`` continues a word, others follow a space.

    The rest of the score is shared by the other labels.
    """
    text = ""
    offsets, words, probs = [], [], []
    for token, label, score in tokens:
        continues = token.startswith("##")
        text += "" if continues or not text else " "
        offsets.append((len(text), len(text) + len(token) - 2 * continues))
        text += token[2 * continues :]
        words.append(words[-1] if continues else len(words))
        probs.append([score if name == label else (1 - score) / (len(LABELS) - 1) for name in LABELS])
    found = entities(np.array(probs, np.float32), aligned(offsets, words=words), text, LABELS, aggregation)
    return [(one.label, round(one.score, 4), one.text) for one in found]


def aligned(offsets: Any, special: Sequence[int] = (), words: Sequence[int] = ()) -> TokenAlignment:
    return TokenAlignment(
        offsets=np.array(offsets, dtype=np.int32),
        special=np.array(special or [0] * len(offsets), dtype=np.bool_),
        words=np.array(words or [-1] * len(offsets), dtype=np.int32),
    )


@pytest.mark.parametrize(
    ("tag_line", "expected"),
    [
        ("O B-PER I-PER O", [("PER", "b c")]),
        ("B-PER B-PER I-PER", [("PER", "a"), ("PER", "b c")]),
        ("I-PER I-LOC I-LOC", [("PER", "a"), ("LOC", "b c")]),
        ("B-LOC I-PER O I-PER", [("LOC", "a"), ("PER", "b"), ("PER", "d")]),
        ("MISC MISC O MISC", [("MISC", "a b"), ("MISC", "d")]),
        ("O O", []),
    ],
)
def test_prefixes_begin_and_continue(tag_line: str, expected: list[tuple[str, str]]):
    tokens = [("abcd"[i], label, 0.75) for i, label in enumerate(tag_line.split())]
    assert by_hand(tokens, "simple") == [(label, 0.75, text) for label, text in expected]
    assert by_hand(tokens, "none") == [(label, 0.75, text) for text, label, _ in tokens]


def test_the_strategies_of_words():
    tokens = [("mill", "B-PER", 0.6), ("##er", "B-LOC", 0.9), ("##s", "B-LOC", 0.5), ("went", "O", 0.9)]
    assert by_hand(tokens, "first") == [("PER", 0.6, "millers")]
    assert by_hand(tokens, "max") == [("LOC", 0.9, "millers")]
    assert by_hand(tokens, "average") == [("LOC", round((0.08 + 0.9 + 0.5) / 3, 4), "millers")]
    assert by_hand(tokens, "simple") == [("PER", 0.6, "mill"), ("LOC", 0.9, "er"), ("LOC", 0.5, "s")]
    equal = [("a", "O", 0.4), ("##b", "I-LOC", 0.8), ("##c", "I-PER", 0.8), ("d", "I-PER", 0.7)]
    assert by_hand(equal, "max") == [("LOC", 0.8, "abc"), ("PER", 0.7, "d")]


# "Ada met Bob." as [CLS] Ada met Bo ##b . [SEP]
MATRIX = np.array([[100, 100], [1, 0], [2, 0], [4, 8], [8, 0], [16, 0], [100, 100]], dtype=np.float32)


OFFSETS = [[0, 0], [0, 3], [4, 7], [8, 10], [10, 11], [11, 12], [0, 0]]


ADA = aligned(OFFSETS, special=[1, 0, 0, 0, 0, 0, 1])


@pytest.mark.parametrize(
    ("span", "expected"),
    [
        ((0, 1), [1, 0]),  # part of a token counts as the token
        ((3, 8), [2, 0]),
        ((0, 7), [1.5, 0]),
        ((9, 11), [6, 4]),
        ((0, 12), [6.2, 1.6]),
    ],
)
def test_a_span_is_the_mean_of_its_tokens(span: tuple[int, int], expected: list[float]):
    rows = span_rows(MATRIX, ADA, [span], index=0)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows, [expected], rtol=1e-6)


def test_a_span_and_a_mean_are_summed_in_double_precision():
    rows = np.concatenate((np.full((1, 1), 1e8), np.ones((1000, 1)), np.full((1, 1), -1e8))).astype(np.float32)
    alignment = aligned(np.stack((np.arange(1002), np.arange(1, 1003)), axis=1))
    np.testing.assert_allclose(span_rows(rows, alignment, [(0, 1002)], index=0), [[1000 / 1002]], rtol=1e-6)
    np.testing.assert_allclose(weighted_mean(rows, np.ones(1002)), [1000 / 1002], rtol=1e-6)


def test_a_token_without_characters_counts_where_it_stands():
    alignment = aligned([[0, 0], [0, 1], [2, 2], [3, 4]])  # "▁", "a", "▁", "b" of "a  b"
    matrix = np.array([[1], [2], [4], [8]], dtype=np.float32)
    rows = span_rows(matrix, alignment, [(0, 2), (2, 4), (2, 3), (0, 4)], index=0)
    np.testing.assert_allclose(rows[:, 0], [1.5, 6, 4, 3.75])


def test_a_span_without_tokens_is_refused():
    with pytest.raises(InvalidRequestError, match=r"span 1, \(3, 4\), of the text at index 5 has no token.* 0 to 12"):
        span_rows(MATRIX, ADA, [(0, 3), (3, 4)], index=5)
    with pytest.raises(InvalidRequestError, match=r"span 0, \(0, 2\), .* has no token, and neither has the text"):
        span_rows(MATRIX[:2], aligned([OFFSETS[0], OFFSETS[6]], special=[1, 1]), [(0, 2)], index=0)


def array(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


TOKENS = st.lists(st.integers(0, 50_000), max_size=60).map(lambda ids: array(*ids))


FEW = st.lists(st.integers(0, 50_000), max_size=4).map(lambda ids: array(*ids))


@given(ids=TOKENS, prefix=FEW, suffix=FEW, room=st.integers(1, 30))
def test_windows_cover_every_token_once(ids: np.ndarray, prefix: np.ndarray, suffix: np.ndarray, room: int):
    limit = room + len(prefix) + len(suffix)
    parts = windows(ids, prefix, suffix, limit)
    own = [part[len(prefix) : len(part) - len(suffix)] for part in parts]
    np.testing.assert_array_equal(np.concatenate(own), ids)
    assert len(parts) == max(1, -(-len(ids) // room))  # the fewest possible
    for part in parts:
        assert part.dtype == np.int32
        assert len(part) <= limit
        np.testing.assert_array_equal(part[: len(prefix)], prefix)
        np.testing.assert_array_equal(part[len(part) - len(suffix) :], suffix)
    assert all(len(part) == room for part in own[:-1])
    assert len(own[-1]) > 0 or len(ids) == 0


def test_a_mean_weighs_by_tokens():
    rows = np.array([[1, 0], [0, 1], [1, 1]], dtype=np.float32)
    mean = weighted_mean(rows, np.array([6, 3, 1]))
    assert mean.dtype == np.float32
    np.testing.assert_allclose(mean, [0.7, 0.4], rtol=1e-6)
    assert np.abs(mean - rows.mean(axis=0)).max() > 0.02, "an unweighted mean would have passed"


WIDTH = 8


QUERY = "How deep is the mill pond?"


Matrices = dict[str, np.ndarray]


def matrices_of(texts: list[str]) -> Matrices:
    """A matrix for each text, of 1 to 9 rows that are not normalized."""
    generator = np.random.default_rng(0)
    return {
        text: generator.normal(size=(generator.integers(1, 10), WIDTH)).astype(np.float32)
        for text in dict.fromkeys(texts)
    }


def unit(matrix: np.ndarray) -> np.ndarray:
    return matrix / np.linalg.norm(matrix, axis=1, keepdims=True)


def kept(comparison: Comparison, role: Role) -> int:
    return len(comparison._kept[role])


def batches(pairs: list[Pair], size: int) -> list[tuple[Role, list[int], list[str]]]:
    """The distinct texts of both sides with their slots, in batches."""
    made: list[tuple[Role, list[int], list[str]]] = []
    sides: tuple[tuple[Role, list[str]], ...] = (
        ("query", [pair.query for pair in pairs]),
        ("document", [pair.document for pair in pairs]),
    )
    for role, texts in sides:
        distinct = list(dict.fromkeys(texts))
        for start in range(0, len(distinct), size):
            slots = list(range(start, min(start + size, len(distinct))))
            made.append((role, slots, [distinct[slot] for slot in slots]))
    return made


SHAPES = {
    "one query": [Pair("q", f"d{i}") for i in range(17)],
    "one document": [Pair(f"q{i}", "d") for i in range(9)],
    "n to n": [Pair(f"q{i}", f"d{i}") for i in range(13)],
    "every query with every document": [Pair(f"q{i}", f"d{j}") for i in range(4) for j in range(5)],
    "duplicates": [Pair("q", "d"), Pair("q", "e"), Pair("q", "d"), Pair("p", "d"), Pair("q", "d")],
    "a text on both sides": [Pair("a", "b"), Pair("b", "a"), Pair("a", "a")],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(("normalize", "mean"), [(True, False), (False, True)])
def test_matrices_may_arrive_in_any_order(shape: str, size: int, normalize: bool, mean: bool) -> None:
    pairs = SHAPES[shape]
    matrices = {role: matrices_of([pair[side] for pair in pairs]) for side, role in enumerate(("query", "document"))}
    change = unit if normalize else np.asarray
    expected = [
        (change(matrices["query"][q]) @ change(matrices["document"][d]).T).max(axis=1).sum()
        / (len(matrices["query"][q]) if mean else 1)
        for q, d in pairs
    ]
    order = batches(pairs, size)
    for seed in range(5):
        random.Random(seed).shuffle(order)
        comparison = Comparison(pairs, width=WIDTH, normalize=normalize, mean=mean)
        for role, slots, texts in order:
            comparison.take(role, slots, [matrices[role][text] for text in texts])
        np.testing.assert_allclose(comparison.scores(), expected, rtol=1e-5, atol=1e-5)
        assert kept(comparison, "query") == kept(comparison, "document") == 0
    assert np.ptp(expected) > 0.1  # an order that mixed pairs up would be noticed


def test_matrices_may_arrive_in_several_threads() -> None:
    pairs = [Pair(f"q{i % 20}", f"d{i}") for i in range(400)]
    matrices = {role: matrices_of([pair[side] for pair in pairs]) for side, role in enumerate(("query", "document"))}
    expected = [(unit(matrices["query"][q]) @ unit(matrices["document"][d]).T).max(axis=1).sum() for q, d in pairs]
    order = batches(pairs, 3)
    with ThreadPoolExecutor(8) as threads:
        for seed in range(3):
            random.Random(seed).shuffle(order)
            comparison = Comparison(pairs, width=WIDTH, normalize=True, mean=False)
            work = [
                threads.submit(comparison.take, role, slots, [matrices[role][text] for text in texts])
                for role, slots, texts in order
            ]
            for each in work:
                each.result()
            np.testing.assert_allclose(comparison.scores(), expected, rtol=1e-5)
            assert kept(comparison, "query") == kept(comparison, "document") == 0


def test_a_kept_matrix_does_not_keep_its_batch_and_is_forgotten_when_the_call_is_over() -> None:
    batch = np.ones((100, WIDTH), dtype=np.float32)
    comparison = Comparison([Pair("q", "d")], width=WIDTH, normalize=False, mean=False)
    comparison.take("document", [0], [batch[:2]])
    (matrix,) = comparison._kept["document"].values()
    assert matrix.base is None
    assert batch.sum() == batch.size
    comparison.drop()
    assert kept(comparison, "document") == 0
    comparison.take("query", [0], [batch[:1]])  # a batch that was running
    assert kept(comparison, "query") == 0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = write_checkpoint(tmp_path_factory.mktemp("comparison") / "bert", "bert")
    with Engine(folder, dtype="float32", device="cpu", max_batch_tokens=256) as engine:
        yield engine


class Delivered:
    """The matrices that calls received, as far as they are still in memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._references: list[weakref.ref[Any]] = []
        self.most = self.count = 0
        lock = threading.Lock()
        deliver = Call.deliver

        def watched(call: Call, slots: Any, results: Any) -> None:
            with lock:
                self.count += len(results)  # before the call may be over
            deliver(call, slots, results)
            with lock:
                self._references = [reference for reference in self._references if reference() is not None]
                self._references += [weakref.ref(result) for result in results if result.ndim == 2]
                self.most = max(self.most, len(self._references))

        monkeypatch.setattr(Call, "deliver", watched)


DOCUMENTS = [f"the {i}th wheel turns in the water of the pond, {i * i} times" for i in range(400)]


@pytest.mark.parametrize("method", ["maxsim", "auto"])
@pytest.mark.parametrize("asynchronous", [False, True])
async def test_the_documents_of_a_rerank_are_never_in_memory_together(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, method: Any, asynchronous: bool
) -> None:
    delivered = Delivered(monkeypatch)
    if asynchronous:
        ranked = await AsyncEngine(engine).rerank(QUERY, DOCUMENTS, method=method)
    else:
        ranked = engine.rerank(QUERY, DOCUMENTS, method=method)
    assert len(ranked) == len(DOCUMENTS)
    assert delivered.count == 1 + len(DOCUMENTS)
    assert delivered.most < 100  # a few batches of 256 tokens
    engine.token_embed(DOCUMENTS)  # negative control: here the matrices are the result
    assert delivered.most >= len(DOCUMENTS) - 100
