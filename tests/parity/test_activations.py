"""The activation of logits: by problem_type as in transformers' pipeline, by sentence-transformers' keys, by option."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny import SENTENCES, edit_json, write_checkpoint

from millpond import Engine
from millpond.errors import InvalidRequestError, ModelLoadError

pytestmark = pytest.mark.contract  # two engines for each case, one of them a peer's

TEXTS = SENTENCES[:4]
IDENTITY, SIGMOID, SOFTMAX = (
    f"torch.nn.modules.{name}" for name in ("linear.Identity", "activation.Sigmoid", "activation.Softmax")
)
APPLIED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "identity": lambda logits: logits,
    "sigmoid": torch.sigmoid,
    "softmax": lambda logits: logits.softmax(-1),
}


def write(folder: Path, labels: int, kind: Any = "SequenceClassification", **config: Any) -> Path:
    return write_checkpoint(folder, "bert", head=kind, labels=labels, config=config)


def load(folder: Path, **options: Any) -> Engine:
    return Engine(folder, dtype="float32", device="cpu", **options)


@pytest.mark.parametrize("labels", [1, 2, 3])
@pytest.mark.parametrize(
    "problem", [None, "regression", "single_label_classification", "multi_label_classification"], ids=str
)
def test_problem_types_are_those_of_transformers_pipeline(problem, labels, tmp_path):
    from transformers import pipeline

    if problem == "single_label_classification" and labels == 1:
        labels = 4  # transformers refuses it with one label
    fields = {} if problem is None else {"problem_type": problem}
    folder = write(tmp_path / "model", labels, **fields)
    reference = pipeline("text-classification", model=str(folder), device="cpu", top_k=None)
    with load(folder) as engine:
        output = engine.classify(TEXTS)
        raw = engine.classify(TEXTS, activation=False).probs
    for row, entries in zip(output.probs, reference(list(TEXTS)), strict=True):
        scores = {entry["label"]: entry["score"] for entry in entries}
        expected = np.array([scores[label] for label in output.labels], dtype=np.float32)
        assert np.abs(row - expected).max() <= 1e-5
    assert (np.abs(output.probs - raw).max() < 1e-7) == (problem == "regression")


@pytest.mark.parametrize(
    ("labels", "fields", "activation"),
    [
        (1, {}, "sigmoid"),
        (3, {}, "softmax"),
        (1, {"sentence_transformers": {"activation_fn": IDENTITY, "version": "5.1.0"}}, "identity"),
        (3, {"sentence_transformers": {"activation_fn": SIGMOID}}, "sigmoid"),
        (3, {"sentence_transformers": {"activation_fn": SOFTMAX}}, "softmax"),
        (1, {"sentence_transformers": {"activation_fn": SOFTMAX}}, "sigmoid"),  # softmax of one logit is always 1
        (1, {"sbert_ce_default_activation_function": IDENTITY}, "identity"),
        (3, {"sbert_ce_default_activation_function": IDENTITY}, "identity"),
        (
            1,
            {
                "sbert_ce_default_activation_function": SIGMOID,
                "sentence_transformers": {"activation_fn": IDENTITY},
            },
            "identity",
        ),
        (1, {"problem_type": "regression", "sbert_ce_default_activation_function": SIGMOID}, "identity"),
    ],
)
def test_keys_of_the_config(labels, fields, activation, tmp_path):
    with load(write(tmp_path / "model", labels, **fields)) as engine:
        assert engine.spec.activation == activation
        raw = torch.from_numpy(engine.classify(TEXTS, activation=False).probs)
        actual = torch.from_numpy(engine.classify(TEXTS).probs)
        for name, apply in APPLIED.items():
            same = bool((actual - apply(raw)).abs().max() < 1e-6)
            assert same == (name == activation)


@pytest.mark.parametrize(
    ("rows", "fields", "activation"),
    [
        (2, {}, "softmax"),
        (2, {"problem_type": "multi_label_classification"}, "sigmoid"),
        (2, {"sbert_ce_default_activation_function": IDENTITY}, "identity"),
        (1, {}, "sigmoid"),
    ],
)
def test_labels_that_only_the_head_counts(rows, fields, activation, tmp_path):
    """transformers does not write two labels, its default, to the file; the other keys apply nevertheless."""
    folder = write(tmp_path / "model", rows, **fields)
    config = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in ("id2label", "label2id")}
    (folder / "config.json").write_text(json.dumps(kept))
    with load(folder) as engine:
        assert engine.spec.labels == tuple(f"LABEL_{i}" for i in range(rows))
        assert engine.spec.activation == activation
        assert engine.classify(TEXTS).probs.shape == (len(TEXTS), rows)


@pytest.mark.parametrize(
    "names",
    [
        {"id2label": {"1": "high", "0": "low"}},
        {"id2label": None, "label2id": {"high": 1, "low": 0}},
        {"id2label": {0: "low", 1: "high"}},
    ],
)
def test_names_of_the_labels(names, tmp_path):
    folder = write(tmp_path / "model", 2)
    edit_json(folder / "config.json", label2id=None)
    edit_json(folder / "config.json", **names)
    with load(folder) as engine:
        assert engine.spec.labels == ("low", "high")
        output = engine.classify(TEXTS)
        (label, score), *_ = output.top(1)[0]
        assert score == max(output.probs[0])
        assert label == ("low", "high")[int(output.probs[0].argmax())]


@pytest.mark.parametrize("default", APPLIED)
@pytest.mark.parametrize("task", ["classify", "token_classify"])
def test_a_request_and_an_engine_may_choose(task, default, tmp_path):
    """``None`` and ``True``: the engine's default; ``False``: no activation; a name: that activation."""
    kind = "SequenceClassification" if task == "classify" else "TokenClassification"

    def rows(engine: Engine, activation: Any) -> torch.Tensor:
        probs = getattr(engine, task)(TEXTS, activation=activation).probs
        return torch.from_numpy(probs if task == "classify" else probs.flat)

    with load(write(tmp_path / "model", 3, kind), activation=default) as engine:
        raw = rows(engine, False)
        assert engine.spec.activation == default
        for activation in (None, True, *APPLIED):
            expected = activation if isinstance(activation, str) else default
            assert (rows(engine, activation) - APPLIED[expected](raw)).abs().max() < 1e-6
        assert (APPLIED["sigmoid"](raw) - APPLIED["softmax"](raw)).abs().max() > 1e-2  # they differ


@pytest.mark.parametrize(("labels", "activation"), [(1, "sigmoid"), (2, "softmax")])
def test_tokens_have_the_pipeline_s_softmax_whatever_the_problem(labels, activation, tmp_path):
    """Except with one label, because the softmax of one logit is always 1."""
    folder = write(tmp_path / "model", labels, "TokenClassification", problem_type="regression")
    with load(folder) as engine:
        assert engine.spec.activation == activation
        raw = torch.from_numpy(engine.token_classify(TEXTS, activation=False).probs.flat)
        actual = torch.from_numpy(engine.token_classify(TEXTS).probs.flat)
        assert (actual - APPLIED[activation](raw)).abs().max() < 1e-6


def test_callers_of_one_batch_choose_for_themselves(tmp_path):
    from millpond import PoolingParams

    with load(write(tmp_path / "model", 3)) as engine:
        activations = [None, False, "sigmoid", "softmax"]
        futures = [engine.submit("classify", TEXTS, PoolingParams(activation=activation)) for activation in activations]
        default, raw, sigmoid, softmax = (torch.from_numpy(future.result().probs) for future in futures)
    assert (default - softmax).abs().max() < 1e-6
    assert (softmax - raw.softmax(-1)).abs().max() < 1e-6
    assert (sigmoid - raw.sigmoid()).abs().max() < 1e-6
    assert (raw - softmax).abs().max() > 1e-2


@pytest.mark.parametrize("dotted", ["torch.nn.modules.activation.GLU", "my_package.Sigmoid", "os.system"])
def test_an_unknown_class_is_refused(dotted, tmp_path):
    folder = write(tmp_path / "model", 1, sentence_transformers={"activation_fn": dotted})
    with pytest.raises(ModelLoadError, match=rf"{dotted}.*Identity, .*Sigmoid, Softmax and Tanh"):
        load(folder)


def test_an_unknown_name_is_refused(tmp_path):
    folder = write(tmp_path / "model", 1)
    with load(folder) as engine, pytest.raises(InvalidRequestError, match="activation='relu'.*identity.*sigmoid"):
        engine.classify(TEXTS, activation="relu")
    with pytest.raises((InvalidRequestError, ModelLoadError), match="activation='relu'"):
        load(folder, activation="relu")
