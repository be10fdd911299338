"""``truncation_side`` of tokenizer_config.json: long texts lose their start in every task, as in the peers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.parity.comparison import TOLERANCE, VISIBLE
from tests.parity.head_oracles import classifier
from tests.tiny import FAMILIES, MAX_TOKENS, SENTENCES, TEXTS, Layout, edit_json, write_checkpoint
from tests.tiny.heads import write_pylate, write_splade
from transformers import AutoTokenizer

from millpond import Engine

pytestmark = pytest.mark.contract  # two engines for each case, one of them a peer's

peers: Any = pytest.importorskip("sentence_transformers")

LONG = " ".join(SENTENCES)
MIXED = [*TEXTS, LONG, "x"]
PAIRS = (("How deep is it?", LONG), (LONG, "The wheel."), (LONG, LONG[::-1]), ("a", "b"))


def by_config(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", truncation_side="left")


def by_file(folder: Path) -> None:
    """tokenizer.json's own truncation, whose side counts where tokenizer_config.json names none."""
    truncation = {"direction": "Left", "max_length": MAX_TOKENS, "strategy": "LongestFirst", "stride": 0}
    edit_json(folder / "tokenizer.json", truncation=truncation)


def opened(folder: Path) -> Engine:
    return Engine(folder, dtype="float32", device="cpu")


def difference(actual: Any, expected: Any) -> float:
    """The largest difference of any value, relative to the largest value."""
    pairs = [(np.asarray(one), np.asarray(other)) for one, other in zip(actual, expected, strict=True)]
    assert all(one.shape == other.shape for one, other in pairs)
    largest = max(float(np.abs(other).max()) for _, other in pairs)
    return max(float(np.abs(one - other).max()) for one, other in pairs) / largest


@pytest.mark.parametrize("family", ["bert", "roberta", "qwen3"])
@pytest.mark.parametrize("name_side", [by_config, by_file])
def test_vectors(name_side: Callable[[Path], None], family: str, tmp_path: Path, record_property: Any) -> None:
    """The end of a text that the caller names is cut all the same."""
    layout = Layout(modules=FAMILIES[family].modules, max_seq_length=MAX_TOKENS)
    folder = write_checkpoint(tmp_path / "model", family, sentence_transformers=layout)
    name_side(folder)
    model = peers.SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    tokens = model.encode(MIXED, output_value="token_embeddings", convert_to_numpy=False)
    expected = model.encode(MIXED, batch_size=1)
    with opened(folder) as engine:
        found = engine.embed(MIXED)
        rows = engine.token_embed(MIXED, normalize=False).embeddings
        worst = max(difference(found.embeddings, expected), difference(rows, [row.numpy() for row in tokens]))
        record_property("error", worst)
        assert worst <= TOLERANCE
        assert found.truncated[len(TEXTS)]
        assert difference(engine.embed(MIXED, truncate="end").embeddings, expected) > VISIBLE
        assert engine.token_spans([LONG])[0].offsets.max() == len(LONG)


def test_sparse_weights(tmp_path: Path) -> None:
    folder = write_splade(tmp_path / "model")
    by_config(folder)
    model = peers.SparseEncoder(str(folder), device="cpu", local_files_only=True)
    expected = model.encode(MIXED, convert_to_sparse_tensor=False).numpy()
    with opened(folder) as engine:
        for options, agrees in (({}, True), ({"truncate": "end"}, False)):
            actual = np.zeros_like(expected)
            for row, weights in zip(actual, engine.sparse_embed(MIXED, **options).embeddings, strict=True):
                row[list(weights)] = list(weights.values())
            assert (difference(actual, expected) <= TOLERANCE) is agrees


@pytest.mark.parametrize("role", ["query", "document"])
def test_late_interaction(role: Any, tmp_path: Path) -> None:
    """The marker stays, as in PyLate, which inserts it into the cut text; sentence-transformers cuts it off."""
    folder = write_pylate(tmp_path / "model")
    by_config(folder)
    with opened(folder) as engine:
        (spans,) = engine.token_spans([LONG], role=role)
        assert spans.tokens[1] in ("[Q] ", "[D] ")
        tail = LONG[spans.offsets[spans.offsets[:, 1] > 0].min() :]
        longer, shorter = engine.token_embed([LONG, tail], role=role).embeddings
        assert len(tail) < len(LONG) and spans.offsets.max() >= len(LONG) - 1
        assert difference([longer], [shorter]) == 0
        assert engine.token_spans([LONG], role=role, truncate="end")[0].offsets.max() < len(LONG) - len(tail)


@pytest.mark.parametrize("family", ["bert", "xlm-roberta"])
def test_pairs(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", family, head="SequenceClassification", labels=1)
    by_config(folder)
    model = peers.CrossEncoder(str(folder), device="cpu", local_files_only=True)
    expected = model.predict(list(PAIRS), batch_size=1)
    queries, documents = ([pair[side] for pair in PAIRS] for side in (0, 1))
    with opened(folder) as engine:
        assert difference(engine.score(queries, documents).scores, expected) <= TOLERANCE
        assert difference(engine.score(queries, documents, truncate="end").scores, expected) > VISIBLE


@pytest.mark.parametrize("kind", ["SequenceClassification", "TokenClassification"])
def test_classes(kind: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", "roberta", head=kind, labels=3)
    by_config(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    logits = classifier(folder)
    ids = [torch.tensor(tokenizer(text, truncation=True)["input_ids"]) for text in MIXED]
    expected = [logits(row).numpy() for row in ids]
    with opened(folder) as engine:
        call = engine.classify if kind == "SequenceClassification" else engine.token_classify
        actual = call(MIXED, activation=False).probs
        assert difference(actual, expected) <= TOLERANCE
        cut = call(MIXED, activation=False, truncate="end").probs
        assert difference(cut, expected) > VISIBLE


def test_the_file_names_no_other_side(tmp_path: Path) -> None:
    """tokenizer_config.json counts more than tokenizer.json."""
    folder = write_checkpoint(tmp_path / "model", "bert")
    by_file(folder)
    edit_json(folder / "tokenizer_config.json", truncation_side="right")
    assert json.loads((folder / "tokenizer.json").read_text())["truncation"]["direction"] == "Left"
    with opened(folder) as engine:
        assert (engine.embed([LONG]).embeddings == engine.embed([LONG], truncate="end").embeddings).all()
