"""GLiNER compared with its published code written out, and with the library gliner where that is installed."""

from __future__ import annotations

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.parity.gliner_oracle import Found, Oracle, Oracle2, by_package, by_package2
from tests.tiny import SENTENCES, edit_json
from tests.tiny.gliner import write_gliner, write_gliner2

from millpond import AsyncEngine, Engine, PoolingParams
from millpond.errors import (
    InputTooLongError,
    InvalidRequestError,
    ModelLoadError,
    UnsupportedArchitectureError,
    UnsupportedTaskError,
    WeightMismatchError,
)
from millpond.values.inputs import TokenIds

TOLERANCE = 1e-5
LABELS = ["person", "a place on earth", "mill"]
# A text of more words than the model reads (24), an empty one, joined words, signs, other scripts, many spaces.
TEXTS = [
    SENTENCES[0],
    "Ada  Lovelace-King lived\tin snake_case, London (1842).",
    "",
    " ".join(SENTENCES[1:4]),
    "Ein Teich, une étang, 池。",
    "a",
    "  \n ",
]
LAYOUTS: dict[str, dict[str, Any]] = {
    "v0": {},
    "hub": {"own_tokenizer": False},
    "pickle": {"weights": "bin"},
    "wide": {"hidden_size": 48, "layers": 2},
    "no lstm": {"layers": 0},
    "marker": {"span_mode": "marker"},
    "words": {"span_mode": "token_level"},
    "bert": {"family": "bert"},
    "modernbert": {"family": "modernbert"},
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"threshold": 0.3},
    {"threshold": 0.2, "nested": True},
    {"threshold": 0.2, "multi_label": True},
    {"threshold": 0.05, "nested": True, "multi_label": True},
]


@cache
def oracle_of(folder: Path) -> Oracle:
    return Oracle(folder)


def found(engine: Engine, texts: list[str] = TEXTS, labels: list[str] = LABELS, **options: Any) -> list[list[Found]]:
    output = engine.token_classify(texts, labels=labels, **options)
    for text, own in zip(texts, output, strict=True):
        assert all(each.text == text[each.start : each.end] for each in own)
    return [[Found(each.start, each.end, each.label, each.score) for each in own] for own in output]


def difference(ours: list[list[Found]], theirs: list[list[Found]]) -> float:
    """The largest difference of a score; infinite if the entities differ."""
    if [[each[:3] for each in own] for own in ours] != [[each[:3] for each in own] for own in theirs]:
        return float("inf")
    pairs = [pair for own, other in zip(ours, theirs, strict=True) for pair in zip(own, other, strict=True)]
    return max((abs(a.score - b.score) for a, b in pairs), default=0.0)


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_to_the_published_code(layout, backend, checkpoint_of, engine_of, record_property):
    engine = engine_of(checkpoint_of(write_gliner, **LAYOUTS[layout]), backend=backend)
    # The oracle reads the layout of today.
    same = {key: value for key, value in LAYOUTS[layout].items() if key not in ("own_tokenizer", "weights")}
    oracle, worst, entities = oracle_of(checkpoint_of(write_gliner, **same)), 0.0, 0
    for options in OPTIONS:
        theirs = [oracle.entities(text, LABELS, **options) for text in TEXTS]
        worst = max(worst, difference(found(engine, **options), theirs))
        entities += sum(map(len, theirs))
    record_property("error", worst)
    assert worst <= TOLERANCE
    assert entities > 20


@pytest.mark.filterwarnings("ignore")  # the library's own
@pytest.mark.skipif(find_spec("gliner") is None, reason="the library gliner is not installed")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_to_the_library(layout, checkpoint_of, engine_of, record_property):
    folder = checkpoint_of(write_gliner, **LAYOUTS[layout])
    worst = max(
        difference(found(engine_of(folder), **each), by_package(folder, TEXTS, LABELS, **each)) for each in OPTIONS
    )
    record_property("error", worst)
    assert worst <= TOLERANCE


# Entities of several labels may be equal, so their order says nothing.
def _in_order(found: list[list[Found]]) -> list[list[Found]]:
    return [sorted(own, key=lambda each: each[:3]) for own in found]


TEXTS2 = [*TEXTS, "See https://a.b/c?d=e, or ask ada@x.org!", "The old mill stands where the river leaves the forest"]


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("counting", ["count_lstm", "count_lstm_v2"])
@pytest.mark.parametrize("family", ["deberta-v2", "modernbert"])
def test_entities_of_gliner2(family, counting, backend, checkpoint_of, engine_of, record_property):
    folder = checkpoint_of(write_gliner2, family, counting=counting)
    engine, oracle, worst, entities = engine_of(folder, backend=backend), Oracle2(folder), 0.0, 0
    for options in ({}, {"threshold": 0.2}, {"threshold": 0.3, "nested": True}):
        theirs = [oracle.entities(text, LABELS, **options) for text in TEXTS2]
        worst = max(worst, difference(_in_order(found(engine, TEXTS2, **options)), _in_order(theirs)))
        entities += sum(map(len, theirs))
    record_property("error", worst)
    assert worst <= TOLERANCE
    assert entities > 20


@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(find_spec("gliner2") is None, reason="the library gliner2 is not installed")
@pytest.mark.parametrize("counting", ["count_lstm", "count_lstm_v2"])
def test_equal_to_the_library_gliner2(counting, checkpoint_of, engine_of):
    folder = checkpoint_of(write_gliner2, "modernbert", counting=counting)
    texts = [text for text in TEXTS2 if text.strip()]
    for threshold in (0.5, 0.2):
        theirs = by_package2(folder, texts, LABELS, threshold=threshold)
        ours = found(engine_of(folder), texts, threshold=threshold)
        assert difference(_in_order(ours), _in_order(theirs)) <= TOLERANCE


def test_a_gliner2_that_counts_no_structures_finds_nothing(checkpoint_of, engine_of):
    folder = checkpoint_of(write_gliner2, "bert", structures=-50.0)
    assert not any(engine_of(folder).token_classify(TEXTS, labels=LABELS, threshold=0.0))


def test_notices_the_other_counting(checkpoint_of, engine_of):
    """The same markers without the layers that make queries of them."""
    folder = checkpoint_of(write_gliner2, "modernbert")
    oracle = Oracle2(folder)
    oracle._queries = lambda labels: labels
    theirs = [oracle.entities(TEXTS[1], LABELS, threshold=0.2)]
    assert difference(_in_order(found(engine_of(folder), TEXTS[1:2], threshold=0.2)), _in_order(theirs)) > 1e-3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architecture": "boundary"}, r"has architecture 'boundary' in config.json, .* it runs span"),
        ({"counting_layer": "count_lstm_moe"}, r"has counting_layer 'count_lstm_moe'"),
        ({"token_pooling": "mean"}, r"has token_pooling 'mean'"),
    ],
)
def test_other_kinds_of_gliner2_are_refused(fields, message, tmp_path):
    folder = write_gliner2(tmp_path / "model", **fields)
    with pytest.raises(UnsupportedArchitectureError, match=message):
        Engine(folder)


@pytest.mark.parametrize("change", ["no LSTM", "another order of labels", "labels by their words", "one more word"])
def test_notices(change, checkpoint_of, engine_of, tmp_path):
    folder = checkpoint_of(write_gliner)
    oracle = Oracle(folder)
    if change == "no LSTM":
        oracle.config["num_rnn_layers"] = 0
    elif change == "labels by their words":
        own, oracle = oracle, Oracle(folder)
        first = own.tokenizer("person", add_special_tokens=False).input_ids[0]
        oracle.config["class_token_index"] = first
    elif change == "one more word":
        oracle.config["max_len"] += 1
    labels = LABELS[::-1] if change == "another order of labels" else LABELS[:1]
    texts = TEXTS[3:4]
    theirs = [oracle.entities(text, labels, threshold=0.2) for text in texts]
    ours = LABELS if change == "another order of labels" else LABELS[:1]
    assert difference(found(engine_of(folder), texts, ours, threshold=0.2), theirs) > 1e-3


async def test_every_way_to_call(checkpoint_of, engine_of):
    engine = engine_of(checkpoint_of(write_gliner))
    assert engine.tasks == {"token_classify"}
    output = engine.token_classify(TEXTS * 10, labels=LABELS, threshold=0.2)
    assert output.labels == tuple(LABELS)
    assert output.truncated.tolist() == [i == 3 for i in range(len(TEXTS))] * 10
    assert output.usage.prompt_tokens > 0
    for own, probs in zip(output, output.probs, strict=True):
        assert probs.shape == (len(own), 3)
        assert [each.score for each in own] == [probs[i, LABELS.index(each.label)] for i, each in enumerate(own)]
    alone = [engine.token_classify([text], labels=LABELS, threshold=0.2) for text in TEXTS]
    awaited = await AsyncEngine(engine).token_classify(TEXTS, labels=LABELS, threshold=0.2)
    for i, own in enumerate(alone):
        for other in (output[i], awaited[i]):
            assert [(a.start, a.end, a.label) for a in own[0]] == [(a.start, a.end, a.label) for a in other]
            assert np.allclose([a.score for a in own[0]], [a.score for a in other], atol=TOLERANCE)
    assert engine.token_classify([], labels=LABELS).entities == ()


def test_a_text_that_is_too_long(checkpoint_of, engine_of):
    engine, text = engine_of(checkpoint_of(write_gliner)), TEXTS[3]
    with pytest.raises(
        InputTooLongError, match=r"the text at index 1 has \d\d words, more than this model reads \(24\)"
    ):
        engine.token_classify(["a", text], labels=LABELS, truncate="error")
    last = engine.token_classify([text], labels=LABELS, truncate="start", threshold=0.0)[0]
    assert last[-1].end == len(text)
    assert last[0].start > 0
    params = PoolingParams(labels=LABELS, threshold=0.0, truncate_prompt_tokens=40)
    output = engine.encode([text], task="token_classify", params=params)
    assert output.truncated.all()
    with pytest.raises(InputTooLongError, match=r"the labels take \d+ of 12 tokens, which leaves none for the text"):
        engine.encode([text], task="token_classify", params=PoolingParams(labels=LABELS, truncate_prompt_tokens=12))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"is a GLiNER, which finds what you name; pass labels=\[...\]"),
        ({"labels": LABELS, "aggregation": "simple"}, r"activation and aggregation mean nothing to a GLiNER"),
        ({"labels": LABELS, "threshold": 2}, r"threshold=2 must be a number from 0 to 1"),
        ({"labels": ["a <<SEP>> b"]}, r"the label 'a <<SEP>> b' holds <<SEP>>, which separates labels"),
    ],
)
def test_options_that_are_refused(options, message, checkpoint_of, engine_of):
    with pytest.raises(InvalidRequestError, match=message):
        engine_of(checkpoint_of(write_gliner)).token_classify(TEXTS, **options)


def test_other_inputs_and_models_are_refused(checkpoint_of, engine_of):
    engine = engine_of(checkpoint_of(write_gliner))
    with pytest.raises(InvalidRequestError, match="takes texts only, no token ids"):
        engine.token_classify([TokenIds((1, 2))], labels=LABELS)
    with pytest.raises(UnsupportedTaskError, match="serves token_classify, not embed"):
        engine.embed(TEXTS)
    tagger = engine_of(checkpoint_of("bert", head="TokenClassification"))
    with pytest.raises(UnsupportedTaskError, match=r"has labels of its own; labels= needs a GLiNER"):
        tagger.token_classify(TEXTS, labels=LABELS)
    with pytest.raises(InvalidRequestError, match=r"threshold=0.3 means nothing without labels"):
        tagger.token_classify(TEXTS, threshold=0.3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"labels_encoder": "BAAI/bge-small-en-v1.5"}, r"is a bi-encoder, .* \(labels_encoder of gliner_config.json\)"),
        ({"relations_layer": "dot"}, "is a GLiNER of relations"),
        ({"labels_decoder": "gpt2"}, "is a GLiNER with a decoder"),
        ({"span_mode": "conv_max"}, r"has span_mode 'conv_max' .* it runs markerV0, marker, token_level"),
        ({"subtoken_pooling": "mean"}, r"has subtoken_pooling 'mean'"),
        ({"words_splitter_type": "spacy"}, r"has words_splitter_type 'spacy'"),
        ({"model_type": "gliner_streaming_span"}, r"has model_type 'gliner_streaming_span'"),
    ],
)
def test_other_kinds_are_refused(fields, message, tmp_path):
    folder = write_gliner(tmp_path / "model")
    edit_json(folder / "gliner_config.json", **fields)
    with pytest.raises(UnsupportedArchitectureError, match=message):
        Engine(folder)


def test_damaged_checkpoints_are_refused(tmp_path):
    folder = write_gliner(tmp_path / "model")
    path = folder / "gliner_config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    for fields, error, message in (
        ({"max_width": 0}, ModelLoadError, r"max_width is 0; it must be a positive int"),
        ({"num_rnn_layers": 0}, WeightMismatchError, r"have rnn\.lstm\.\S+, which gliner_config.json knows nothing of"),
        ({"num_rnn_layers": 2}, WeightMismatchError, r"rnn.lstm.weight_ih_l1 is missing"),
        ({"hidden_size": 30}, WeightMismatchError, r"projection.weight has the shape \(32, 48\)"),
    ):
        edit_json(path, **{**content, **fields})
        with pytest.raises(error, match=message):
            Engine(folder, dtype="float32", device="cpu")
