"""Entities and late chunking: equal to transformers' pipeline, and by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny import SENTENCES, TEXTS, write_checkpoint

from millpond import Engine, Entity
from millpond.engine.output.entities import entities
from millpond.engine.output.spans import span_rows
from millpond.engine.tokenize.tokenized import TokenAlignment
from millpond.errors import InvalidRequestError
from millpond.tasks import AGGREGATIONS, Aggregation

LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "MISC")
CASES = {
    "bert": {"family": "bert"},
    "bert, case folded": {"family": "bert", "lowercase": True},
    "roberta": {"family": "roberta"},
    "modernbert": {"family": "modernbert"},
    "xlm-roberta": {"family": "xlm-roberta"},
    "llama": {"family": "llama"},
}
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

# transformers warns each time that it uses its heuristic for tokenizers without marked subwords.
pytestmark = pytest.mark.filterwarnings("ignore:Tokenizer does not support real words:UserWarning")


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

    write_checkpoint(folder, **CASES[case])
    names = dict(enumerate(LABELS))
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


def test_a_span_is_summed_in_double_precision():
    rows = np.concatenate((np.full((1, 1), 1e8), np.ones((1000, 1)), np.full((1, 1), -1e8))).astype(np.float32)
    alignment = aligned(np.stack((np.arange(1002), np.arange(1, 1003)), axis=1))
    np.testing.assert_allclose(span_rows(rows, alignment, [(0, 1002)], index=0), [[1000 / 1002]], rtol=1e-6)


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
