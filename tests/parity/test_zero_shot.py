"""Zero-shot classification compared with transformers' pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny import SENTENCES
from tests.tiny.heads import NLI, write_nli

from millpond import AsyncEngine, Engine, PoolingParams
from millpond.errors import InvalidRequestError, UnsupportedTaskError
from millpond.values.inputs import Pair

TOLERANCE = 1e-5
VISIBLE = 1e-3
FAMILIES = (
    "bert",
    "bart",
    "roberta",
    "xlm-roberta",
    "distilbert",
    "mpnet",
    "modernbert",
    "deberta-v2",
    "electra",
    "albert",
)
LABELS = ["water", "the wheel", "a bakery"]
# The last two are longer than the model reads: only the text is cut.
TEXTS = [SENTENCES[0], "a", " ".join(SENTENCES[1:8]), " ".join(SENTENCES[4:12])]


def expected(folder: Path, labels: list[str] = LABELS, texts: list[str] = TEXTS, **options: Any) -> np.ndarray:
    """``[n, labels]`` by transformers' pipeline, in the order of the labels."""
    from transformers import pipeline

    classify = pipeline("zero-shot-classification", model=str(folder), device="cpu", dtype="float32")
    results = classify(texts, candidate_labels=labels, **options)
    scores = [dict(zip(result["labels"], result["scores"], strict=True)) for result in results]
    return np.array([[each[label] for label in labels] for each in scores])


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_the_pipeline(family, backend, checkpoint_of, engine_of, record_property):
    folder = checkpoint_of(write_nli, family)
    output = engine_of(folder, backend=backend).classify(TEXTS, labels=LABELS)
    assert output.labels == tuple(LABELS)
    assert output.truncated.tolist() == [False, False, True, True]
    worst = float(np.abs(output.probs - expected(folder)).max())
    record_property("error", worst)
    assert worst <= TOLERANCE


@pytest.mark.parametrize(
    "names", [NLI, NLI[::-1], ("entailment", "not_entailment"), ("not_entailment", "ENTAILMENT")], ids=str
)
@pytest.mark.parametrize("multi_label", [False, True])
def test_every_order_of_the_classes(names, multi_label, checkpoint_of, engine_of):
    """The other of two probabilities is of contradiction: the first class, or the last if the first is entailment."""
    folder = checkpoint_of(write_nli, "bert", names)
    engine, template = engine_of(folder), "The text is about {}"
    output = engine.classify(TEXTS, labels=LABELS, template=template, multi_label=multi_label)
    theirs = expected(folder, hypothesis_template=template, multi_label=multi_label)
    assert np.abs(output.probs - theirs).max() <= TOLERANCE
    for wrong in (
        engine.classify(TEXTS, labels=LABELS, multi_label=multi_label),
        engine.classify(TEXTS, labels=LABELS, template=template, multi_label=not multi_label),
    ):
        assert np.abs(wrong.probs - theirs).max() > VISIBLE


def test_one_label_competes_with_its_contradiction(checkpoint_of, engine_of):
    folder = checkpoint_of(write_nli)
    output = engine_of(folder).classify(TEXTS, labels=LABELS[:1])
    assert np.abs(output.probs - expected(folder, LABELS[:1])).max() <= TOLERANCE


def test_notices_a_hypothesis_that_is_cut(checkpoint_of, engine_of):
    """A cross-encoder cuts the longer of two texts, here the hypothesis."""
    folder = checkpoint_of(write_nli)
    labels = [SENTENCES[4], SENTENCES[14]]  # either takes more than half of the tokens that a pair may have
    texts, engine = [" ".join(SENTENCES[6:12])], engine_of(folder)
    theirs = expected(folder, labels, texts)
    assert np.abs(engine.classify(texts, labels=labels).probs - theirs).max() <= TOLERANCE
    pairs = [Pair(texts[0], f"This example is {label}.") for label in labels]
    logits = engine.classify(pairs, activation=False).probs[:, 2]
    both_cut = np.exp(logits) / np.exp(logits).sum()
    assert np.abs(both_cut - theirs[0]).max() > VISIBLE


async def test_every_way_to_call(checkpoint_of, engine_of):
    engine = engine_of(checkpoint_of(write_nli))
    output = engine.classify(TEXTS * 20, labels=LABELS)  # more than are worked on in the calling thread
    assert np.array_equal(output.probs[: len(TEXTS)], output.probs[-len(TEXTS) :])
    assert output.usage.prompt_tokens > 20 * 64
    few = await AsyncEngine(engine).classify(TEXTS[:1], labels=LABELS)
    submitted = engine.submit("classify", TEXTS[:1], PoolingParams(labels=LABELS)).result()
    for other in (few, submitted):
        assert np.abs(other.probs - output.probs[:1]).max() <= TOLERANCE
    assert engine.classify([], labels=LABELS).probs.shape == (0, 3)
    assert engine.classify(TEXTS).labels == NLI


def test_without_entailment_labels_are_refused(checkpoint_of, engine_of, tmp_path):
    engine = engine_of(checkpoint_of(write_nli, "bert", ("good", "bad")))
    assert engine.spec.entailment_id is None
    with pytest.raises(UnsupportedTaskError, match=r"has the labels good, bad, none of which begins with entail"):
        engine.classify(TEXTS, labels=LABELS)
    with pytest.raises(UnsupportedTaskError, match=r"serves embed, token_embed, not classify"):
        engine_of("bert").classify(TEXTS, labels=LABELS)
    folder = checkpoint_of(write_nli, "bert", ("good", "bad"))
    named = {"label2id": {"bad": 1, "entailment": 0}}
    with Engine(folder, dtype="float32", device="cpu", hf_overrides=named) as renamed:
        assert renamed.classify(TEXTS[:1], labels=LABELS).probs.shape == (1, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": "water"}, r"labels='water' must be a list of labels"),
        ({"labels": []}, r"must have at least one label"),
        ({"labels": ["a", "a"]}, r"none of them twice"),
        ({"labels": ["a", " "]}, r"labels holds ' '; each label must be a str that is not blank"),
        ({"labels": ["a", 3]}, r"labels holds 3"),
        ({"labels": ["a"], "template": "about"}, r"template='about' must have one \{\}, the place of the label"),
        ({"template": "about {}"}, r"template='about \{\}' means nothing without labels"),
        ({"multi_label": True}, r"multi_label=True means nothing without labels"),
        ({"labels": ["a"], "multi_label": 1}, r"multi_label=1 must be True or False"),
        ({"labels": ["a"], "activation": "sigmoid"}, r"activation='sigmoid' means nothing beside labels"),
    ],
)
def test_options_that_are_refused(options, message, checkpoint_of, engine_of):
    with pytest.raises(InvalidRequestError, match=message):
        engine_of(checkpoint_of(write_nli)).classify(TEXTS, **options)


def test_pairs_are_refused(checkpoint_of, engine_of):
    engine = engine_of(checkpoint_of(write_nli))
    with pytest.raises(InvalidRequestError, match=r"classify with labels takes a text at index 0, not a Pair"):
        engine.classify([Pair("a", "b")], labels=LABELS)
