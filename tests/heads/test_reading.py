"""Heads read from safetensors and run without torch: their formulas in numpy's float64."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from millpond.backends.native.heads.classifier import ClassifierHead
from millpond.backends.native.heads.modules import Modules
from millpond.backends.native.heads.splade import SpladeHead
from millpond.backends.native.heads.token_weights import TokenWeightHead, read_token_vectors
from millpond.backends.native.heads.vocabulary_rows import head_rows
from millpond.checkpoints.classifier_steps import HeadRows, Linear, Norm
from millpond.checkpoints.classifiers import Classifier
from millpond.checkpoints.layouts.sparse import Splade, TokenVectors, TokenWeights
from millpond.checkpoints.modules import Dense, LayerNorm, Normalize
from millpond.errors import WeightMismatchError
from millpond.native import library

pytestmark = pytest.mark.skipif(library.kernel_table() is None, reason="no compiled kernels")

BOUNDS = np.int32([0, 3, 4, 20])
WIDTH = 48


def numbers(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng([7, *shape]).standard_normal(shape) * scale).astype(np.float32)


HIDDEN = numbers(20, WIDTH)


def write(folder: Path, tensors: dict[str, np.ndarray], **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def classifier(folder: Path, *steps: object, pooling: str | None = "cls", **fields: object) -> ClassifierHead:
    return ClassifierHead(
        Classifier(folder=folder, pooling=pooling, steps=steps, labels=(), activation="identity", **fields), width=WIDTH
    )


def normed(rows: np.ndarray, epsilon: float) -> np.ndarray:
    centered = rows - rows.mean(-1, keepdims=True)
    return centered / np.sqrt(np.square(centered).mean(-1, keepdims=True) + epsilon)


def test_a_classifier_of_several_steps(tmp_path):
    tensors = {
        "model.dense.weight": numbers(40, WIDTH),
        "model.dense.bias": numbers(40),
        "norm.weight": numbers(40),
        "out.weight": numbers(3, 40),
    }
    head = classifier(
        write(tmp_path, tensors),
        Linear(name="dense"),
        "tanh",
        Norm(name="norm", eps=1e-5),
        Linear(name="out", biased=False),
        divisor=2.0,
    )
    rows = np.tanh(HIDDEN.astype(np.float64) @ tensors["model.dense.weight"].T + tensors["model.dense.bias"])
    expected = normed(rows, 1e-5) * tensors["norm.weight"] @ tensors["out.weight"].T / 2
    assert np.abs(head.tokens(HIDDEN, 2) - expected).max() <= 1e-5
    assert np.abs(head.pool(HIDDEN, BOUNDS, 1) - expected[[0, 3, 4]]).max() <= 1e-5
    with pytest.raises(WeightMismatchError, match=r"no tensor out.bias"):
        classifier(tmp_path, Linear(name="dense"), Linear(name="out"))


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_logits_of_two_tokens_and_their_difference(softcap, tmp_path):
    table = numbers(90, WIDTH)
    folder = write(tmp_path, {"model.embed_tokens.weight": table}, final_logit_softcapping=softcap)
    logits = HIDDEN.astype(np.float64) @ table[[60, 7]].T
    logits = logits if softcap is None else softcap * np.tanh(logits / softcap)
    assert np.abs(head_rows(folder, (60, 7))(HIDDEN, 1) - logits).max() <= 1e-5 * np.abs(logits).max()
    pair = classifier(folder, HeadRows(tokens=(60, 7), difference=True), pooling="lasttoken")
    expected = logits[[2, 3, 19], 1:2] - logits[[2, 3, 19], 0:1]
    assert np.abs(pair.pool(HIDDEN, BOUNDS, 1) - expected).max() <= 1e-5 * np.abs(logits).max()


def test_modules_after_the_pooling(tmp_path):
    dense = {"linear.weight": numbers(12, WIDTH), "linear.bias": numbers(12), "residual.weight": numbers(12, WIDTH)}
    norm = {"norm.weight": numbers(12), "norm.bias": numbers(12)}
    description = Dense(
        folder=write(tmp_path / "dense", dense),
        in_features=WIDTH,
        out_features=12,
        bias=True,
        activation="torch.nn.modules.activation.Sigmoid",
        residual=True,
    )
    chain = (description, LayerNorm(folder=write(tmp_path / "norm", norm), dimensions=12), Normalize())
    rows = HIDDEN.astype(np.float64)
    expected = 1 / (1 + np.exp(-(rows @ dense["linear.weight"].T + dense["linear.bias"])))
    expected = normed(expected + rows @ dense["residual.weight"].T, 1e-5) * norm["norm.weight"] + norm["norm.bias"]
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert np.abs(Modules(chain, width=WIDTH)(HIDDEN, 2) - expected).max() <= 1e-5


def test_splade(tmp_path):
    prefix = "cls.predictions."
    tensors = {
        f"{prefix}transform.dense.weight": numbers(WIDTH, WIDTH, scale=0.2),
        f"{prefix}transform.dense.bias": numbers(WIDTH),
        f"{prefix}transform.LayerNorm.gamma": numbers(WIDTH),
        f"{prefix}transform.LayerNorm.beta": numbers(WIDTH),
        "bert.embeddings.word_embeddings.weight": numbers(71, WIDTH, scale=0.2),
        f"{prefix}bias": numbers(71) - 1,
    }
    folder = write(tmp_path, tensors)
    config = {"model_type": "bert", "hidden_act": "relu", "layer_norm_eps": 1e-12}
    head = SpladeHead(Splade(folder=folder), config, width=WIDTH, dtype="float32")
    dense, bias, gamma, beta, table, decoder_bias = (part.astype(np.float64) for part in tensors.values())
    logits = (normed(np.maximum(HIDDEN @ dense.T + bias, 0), 1e-12) * gamma + beta) @ table.T + decoder_bias
    for i, entries in enumerate(head.read(HIDDEN, BOUNDS, np.zeros(20, np.int32), 2)):
        expected = np.log1p(np.maximum(logits[BOUNDS[i] : BOUNDS[i + 1]].max(0), 0))
        assert entries[:, 0].tolist() == np.flatnonzero(expected).tolist()
        assert np.abs(entries[:, 1] - expected[expected > 0]).max() <= 1e-5


def test_token_weights_and_vectors(tmp_path):
    lexical = {"weight": numbers(1, WIDTH), "bias": np.float32([0.3])}
    save_file(lexical, tmp_path / "sparse_linear.safetensors")
    head = TokenWeightHead(TokenWeights(path=tmp_path / "sparse_linear.safetensors", unused=(0, 2)), width=WIDTH)
    ids = np.int32([0, 9, 2, 5, *([9, 4] * 8)])
    each = np.maximum(HIDDEN.astype(np.float64) @ lexical["weight"][0] + 0.3, 0)
    for i, entries in enumerate(head.read(HIDDEN, BOUNDS, ids, 1)):
        text = slice(BOUNDS[i], BOUNDS[i + 1])
        pairs = [
            (int(token), weight) for token, weight in zip(ids[text], each[text], strict=True) if token not in (0, 2)
        ]
        largest = {token: max(w for t, w in pairs if t == token) for token, _ in pairs}
        expected = sorted((token, weight) for token, weight in largest.items() if weight > 0)
        assert np.allclose(entries, np.reshape(expected, (-1, 2)), atol=1e-5)
    save_file({"weight": numbers(24, WIDTH)}, tmp_path / "colbert_linear.safetensors")
    vectors = read_token_vectors(TokenVectors(path=tmp_path / "colbert_linear.safetensors"), width=WIDTH)(HIDDEN, 2)
    assert np.abs(vectors - HIDDEN @ numbers(24, WIDTH).T).max() <= 1e-4
    with pytest.raises(WeightMismatchError, match="are 64 wide"):
        read_token_vectors(TokenVectors(path=tmp_path / "colbert_linear.safetensors"), width=64)


@pytest.mark.contract
def test_heads_import_neither_torch_nor_transformers():
    code = "import sys, millpond.backends.native.model; print({'torch', 'transformers'} & sys.modules.keys())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
