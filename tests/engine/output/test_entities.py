"""Entities from token probabilities: equal to those of transformers' pipeline, by every strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny import SENTENCES, TEXTS, write_checkpoint

from millpond import Engine, Entity
from millpond.engine.output.entities import entities
from millpond.engine.tokenize.text_tokenizer import TextTokenizer
from millpond.engine.tokenize.tokenized import TokenAlignment
from millpond.engine.tokenize.word_ids import word_numbers
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


@dataclass(frozen=True, kw_only=True)
class Case:
    """A text, its tokens and probabilities, and the pipeline's entities by each strategy."""

    text: str
    probs: np.ndarray
    alignment: TokenAlignment
    expected: dict[Aggregation, list[dict[str, Any]]]


def found(case: Case, aggregation: Aggregation, **changed: Any) -> list[Entity]:
    tokens = case.alignment
    args = {"offsets": tokens.offsets, "special": tokens.special, "words": tokens.words, **changed}
    return entities(case.probs, args["offsets"], args["special"], args["words"], case.text, LABELS, aggregation)


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


def softmax(logits: np.ndarray) -> np.ndarray:
    """As the pipeline computes it, to the last bit: two labels may be nearly equal."""
    exponents = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponents / exponents.sum(axis=-1, keepdims=True)  # type: ignore[no-any-return]


def read(pipeline: Any, tokenizer: TextTokenizer, texts: Sequence[str]) -> list[Case]:
    import torch

    tokenized = tokenizer.encode(texts, prompt="", limit=64, truncate="end", index_of=lambda i: i, align=True)
    cases = []
    for text, ours in zip(texts, tokenized, strict=True):
        with torch.inference_mode():
            outputs = [pipeline._forward(inputs) for inputs in pipeline.preprocess(text, is_split_into_words=False)]
        np.testing.assert_array_equal(ours.ids, outputs[0]["input_ids"][0])
        assert ours.alignment is not None
        expected: dict[Aggregation, list[dict[str, Any]]] = {}
        for name in AGGREGATIONS:
            chosen = pipeline._sanitize_parameters(
                aggregation_strategy=name, ignore_labels=[] if name == "none" else None
            )[2]
            expected[name] = pipeline.postprocess(outputs, **chosen)
        probs = softmax(outputs[0]["logits"][0].numpy())
        cases.append(Case(text=text, probs=probs, alignment=ours.alignment, expected=expected))
    return cases


@pytest.fixture(
    scope="module",
    params=[name if name == "bert" else pytest.param(name, marks=pytest.mark.contract) for name in CASES],
)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, TextTokenizer]:
    folder = tmp_path_factory.mktemp("tagger") / "model"
    pipeline = tagger(folder, request.param)
    return pipeline, TextTokenizer.load(folder, lower=False)


@pytest.fixture(scope="module")
def cases(oracle: tuple[Any, TextTokenizer]) -> list[Case]:
    return read(*oracle, [*HARD, *TEXTS, *SENTENCES])


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_entities_equal_transformers(cases: list[Case], aggregation: Aggregation):
    for case in cases:
        ours = found(case, aggregation)
        assert same(ours, case.expected[aggregation]), (case.text, ours, case.expected[aggregation])
        assert all(one.text == case.text[one.start : one.end] for one in ours)
        assert all(type(one.score) is float and type(one.start) is int for one in ours)
    assert sum(len(case.expected[aggregation]) for case in cases) > 50


def test_the_engine_equals_transformers(oracle: tuple[Any, TextTokenizer], cases: list[Case]):
    texts = [case.text for case in cases]
    with Engine(oracle[0].tokenizer.name_or_path, dtype="float32", device="cpu") as engine:
        for aggregation in AGGREGATIONS:
            output = engine.token_classify(texts, aggregation=aggregation)
            assert output.labels == LABELS
            assert len(output) == len(output.probs) == len(texts)
            for ours, probs, case in zip(output, output.probs, cases, strict=True):
                np.testing.assert_allclose(probs, case.probs, rtol=0, atol=1e-5)
                assert same(ours, case.expected[aggregation]), case.text
        assert any(output.truncated) and not all(output.truncated)


@pytest.mark.parametrize("wrong", ["strategy", "offsets", "probabilities", "special tokens"])
def test_a_wrong_input_differs(cases: list[Case], wrong: str):
    for aggregation in AGGREGATIONS:
        assert differs(cases, aggregation, wrong), aggregation


def differs(cases: list[Case], aggregation: Aggregation, wrong: str) -> bool:
    if wrong == "strategy":
        differing = [other for other in AGGREGATIONS if other != aggregation]
        results = [(found(case, other), case) for other in differing for case in cases]
        assert all(
            any(not same(found(case, other), case.expected[aggregation]) for case in cases) for other in differing
        )
    elif wrong == "offsets":
        results = [(found(case, aggregation, offsets=case.alignment.offsets + 1), case) for case in cases]
    elif wrong == "probabilities":
        results = [(found(Case(**{**vars(case), "probs": case.probs[::-1]}), aggregation), case) for case in cases]
    else:
        results = [(found(case, aggregation, special=np.zeros_like(case.alignment.special)), case) for case in cases]
    return any(not same(ours, case.expected[aggregation]) for ours, case in results)


def by_hand(
    tokens: Sequence[tuple[str, str, float]], aggregation: Aggregation, labels: tuple[str, ...] = LABELS
) -> list[tuple[str, float, str]]:
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
        probs.append([score if name == label else (1 - score) / (len(labels) - 1) for name in labels])
    result = entities(
        np.array(probs, dtype=np.float32),
        np.array(offsets, dtype=np.int32),
        np.zeros(len(tokens), dtype=np.bool_),
        np.array(words, dtype=np.int32),
        text,
        labels,
        aggregation,
    )
    return [(one.label, round(one.score, 4), one.text) for one in result]


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
    each = [(label, 0.75, text) for text, label, _ in tokens]
    assert by_hand(tokens, "none") == each


def test_the_strategies_of_words_by_hand():
    tokens = [("mill", "B-PER", 0.6), ("##er", "B-LOC", 0.9), ("##s", "B-LOC", 0.5), ("went", "O", 0.9)]
    assert by_hand(tokens, "first") == [("PER", 0.6, "millers")]
    assert by_hand(tokens, "max") == [("LOC", 0.9, "millers")]
    assert by_hand(tokens, "average") == [("LOC", round((0.08 + 0.9 + 0.5) / 3, 4), "millers")]
    assert by_hand(tokens, "simple") == [("PER", 0.6, "mill"), ("LOC", 0.9, "er"), ("LOC", 0.5, "s")]


def test_of_equally_likely_tokens_the_first_labels_the_word():
    tokens = [("a", "O", 0.4), ("##b", "I-LOC", 0.8), ("##c", "I-PER", 0.8), ("d", "I-PER", 0.7)]
    assert by_hand(tokens, "max") == [("LOC", 0.8, "abc"), ("PER", 0.7, "d")]


def test_a_token_without_a_word_is_one_itself():
    probs = np.full((3, 2), 0.5, dtype=np.float32) + np.array([[0.1, -0.1], [-0.1, 0.1], [-0.2, 0.2]], np.float32)
    offsets = np.array([[0, 1], [1, 2], [2, 3]], dtype=np.int32)
    ours = entities(probs, offsets, np.zeros(3, np.bool_), np.full(3, -1, np.int32), "abc", ("O", "B-X"), "first")
    assert [(one.text, round(one.score, 4)) for one in ours] == [("b", 0.6), ("c", 0.7)]


def test_words_end_at_spaces_where_no_token_is_marked():
    text = "don't stop."
    offsets = np.array([[0, 0], [0, 3], [3, 5], [6, 10], [10, 11], [0, 0]], dtype=np.int32)
    special = np.array([1, 0, 0, 0, 0, 1], dtype=np.bool_)
    none = np.zeros(6, dtype=np.bool_)
    assert word_numbers(offsets, special, none, text, tokens=None).tolist() == [-1, 0, 0, 1, 1, -1]
    unknown = np.array([0, 0, 1, 0, 0, 0], dtype=np.bool_)
    assert word_numbers(offsets, special, unknown, text, tokens=None).tolist() == [-1, 0, 1, 2, 2, -1]


def test_words_continue_with_marked_tokens():
    text = "don't stop."
    offsets = np.array([[0, 0], [0, 2], [2, 3], [3, 5], [6, 10], [10, 11], [0, 0]], dtype=np.int32)
    special = np.array([1, 0, 0, 0, 0, 0, 1], dtype=np.bool_)
    tokens = ["[CLS]", "do", "##n", "[UNK]", "stop", ".", "[SEP]"]
    unknown = np.array([token == "[UNK]" for token in tokens])
    numbers = word_numbers(offsets, special, unknown, text, tokens=tokens)
    assert numbers.dtype == np.int32
    assert numbers.tolist() == [-1, 0, 0, 1, 2, 3, -1]
