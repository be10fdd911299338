"""JinaBERT v2 (jina-embeddings-v2, jina-reranker-v1) from its original files, in both layouts and both backends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.parity.alibi_oracles import jina_bert, slopes
from tests.parity.test_backbones import TOLERANCE, VISIBLE, Matrices, difference, ids_of, states
from tests.tiny import TEXTS, write_checkpoint

from millpond import Engine
from millpond.backends.native.plans.jina_bert import slopes as own_slopes
from millpond.errors import UnsupportedArchitectureError

FAMILIES = ("jina-bert", "jina-bert-code")
BACKENDS = ("native", "torch")
# Heads beside a power of two, as the base models have them, and more columns than a unit of the kernels.
TWELVE = {"hidden_size": 96, "num_attention_heads": 12}
LONG = " ".join(TEXTS * 2)
AUTO_MAP = {
    "AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel",
    "AutoModelForMaskedLM": "jinaai/jina-bert-implementation--modeling_bert.JinaBertForMaskedLM",
}


def expected(folder: Path, texts: tuple[str, ...] = TEXTS, **mistakes: Any) -> Matrices:
    config = json.loads((folder / "config.json").read_text())
    reference = jina_bert(folder, config, **mistakes)
    with torch.inference_mode():
        return [reference(ids).numpy() for ids in ids_of(folder, texts)]


def found(folder: Path, backend: Any, texts: tuple[str, ...] = TEXTS, **options: Any) -> Matrices:
    with Engine(folder, backend=backend, dtype="float32", device="cpu", **options) as engine:
        return states(engine, texts)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("jina-bert")
    for family in FAMILIES:
        # As on the hub: the masked language model, with the code of its own.
        write_checkpoint(root / family, family, wrapped=True, config=TWELVE | {"auto_map": AUTO_MAP})
    return root.joinpath


def power_of_two_only(heads: int) -> list[float]:
    """The rule for a power of two, for any number of heads."""
    return [2 ** (-8 * (i + 1) / heads) for i in range(heads)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_twelve_heads_and_every_mistake(family, backend, folder_of, record_property):
    own = found(folder_of(family), backend)
    worst = difference(own, expected(folder_of(family)))
    record_property("error", worst)
    assert worst <= TOLERANCE
    mistakes: list[dict[str, Any]] = [{"swapped": True}, {"one_sided": True}, {"slopes_of": power_of_two_only}]
    for mistake in mistakes:
        assert difference(own, expected(folder_of(family), **mistake)) > VISIBLE, mistake


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_text_beside_short_ones(family, backend, tmp_path):
    """Of more tokens than a block of the kernels has."""
    config = {"max_position_embeddings": 1024, "feed_forward_type": "reglu"}
    folder = write_checkpoint(tmp_path / family, family, config=config, tokenizer_limit=1000)
    texts = ("a", LONG, TEXTS[1])
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    reference = jina_bert(folder, json.loads((folder / "config.json").read_text()))
    with torch.inference_mode():
        right = [reference(torch.tensor(tokenizer(text)["input_ids"])).numpy() for text in texts]
    assert len(right[1]) > 600
    assert difference(found(folder, backend, texts), right) <= TOLERANCE


@pytest.mark.parametrize("heads", [*range(1, 33), 64, 96])
def test_slopes(heads):
    np.testing.assert_allclose(own_slopes(heads), slopes(heads), rtol=1e-6)


def test_slopes_by_hand():
    halves = [2.0**-i for i in range(1, 9)]
    assert slopes(8) == pytest.approx(halves)
    assert slopes(12) == pytest.approx([*halves, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_reranker_reads_the_first_token_through_the_pooler(backend, tmp_path):
    """jina-reranker-v1: ``JinaBertForSequenceClassification`` with one label."""
    from transformers import AutoTokenizer

    folder = write_checkpoint(tmp_path / "model", "jina-bert", head="SequenceClassification", labels=1)
    tensors = load_file(folder / "model.safetensors")
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    reference = jina_bert(folder, json.loads((folder / "config.json").read_text()))
    queries, documents = TEXTS[1:4], TEXTS[4:7]
    logits, unpooled = [], []
    for query, document in zip(queries, documents, strict=True):
        ids = tokenizer(query, document, truncation="longest_first", max_length=64, return_tensors="pt")
        first = reference(ids["input_ids"][0], ids["token_type_ids"][0])[0]
        pooled = torch.tanh(tensors["bert.pooler.dense.weight"] @ first + tensors["bert.pooler.dense.bias"])
        logits.append(float(tensors["classifier.weight"][0] @ pooled + tensors["classifier.bias"][0]))
        unpooled.append(float(tensors["classifier.weight"][0] @ first + tensors["classifier.bias"][0]))
    with Engine(folder, backend=backend, dtype="float32", device="cpu") as engine:
        scores = engine.score(list(queries), list(documents)).scores
    right, wrong = (1 / (1 + np.exp(-np.array(numbers))) for numbers in (logits, unpooled))
    assert np.abs(scores - right).max() <= TOLERANCE
    assert np.abs(scores - wrong).max() > VISIBLE


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_text_is_longer_than_its_table(backend, tmp_path):
    folder = write_checkpoint(tmp_path / "model", "jina-bert", tokenizer_limit=None)
    with Engine(folder, backend=backend, dtype="float32", device="cpu") as engine:
        assert engine.spec.max_length == 64
        assert len(states(engine, [LONG])[0]) == 64


@pytest.mark.parametrize("kind", [None, "original", "swiglu"])
def test_a_feed_forward_without_a_gate_is_refused(kind, tmp_path):
    folder = write_checkpoint(tmp_path / "model", "jina-bert", config={"feed_forward_type": kind})
    with pytest.raises(UnsupportedArchitectureError, match="it runs the gated ones: geglu, reglu"):
        Engine(folder)
