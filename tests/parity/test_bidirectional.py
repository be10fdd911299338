"""Embedders made of decoders without the causal mask: what their own code does, besides, is in the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tests.parity.oracles import lfm2, without_mask
from tests.parity.test_backbones import SHORT, TOLERANCE, VISIBLE, difference, ids_of, states
from tests.tiny import TEXTS, Layout, Normalize, Pooling, edit_json, write_checkpoint
from tests.tiny.heads import write_pylate
from tests.tiny.layouts import Codes, Dense
from tests.tiny.noise import Noise

from millpond import Engine
from millpond.errors import WeightMismatchError

pytestmark = pytest.mark.contract

BACKENDS = pytest.mark.parametrize("backend", ["native", "torch"])
VOYAGE = {"AutoModel": "modeling_qwen3_bidirectional.Qwen3BidirectionalModel"}
MEAN = (Pooling(modes=("mean",)),)


def engine(folder: Path, **options: Any) -> Engine:
    return Engine(folder, dtype="float32", device="cpu", **options)


def both_ways(folder: Path, **fields: Any) -> list[list[np.ndarray]]:
    """States of the texts with every token attending to every other one, and with the causal mask."""
    with torch.inference_mode():
        return [[model(ids).numpy() for ids in ids_of(folder, SHORT)] for model in without_mask(folder, **fields)]


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


@BACKENDS
@pytest.mark.parametrize(
    ("family", "fields", "stored"),
    [
        ("pplx-embed", {"model_type": "qwen3"}, {}),
        ("bidirlm", {"model_type": "qwen3"}, {}),
        ("ministral3", {}, {"is_causal": False}),  # Nemotron-3-Embed
        ("llama-bidirectional", {"model_type": "llama"}, {}),  # llama-embed-nemotron
        ("gemma3", {}, {"is_causal": False}),
    ],
)
def test_every_token_attends_to_every_other(family, fields, stored, backend, tmp_path):
    config = {"sliding_window": 4096} if family == "gemma3" else {}
    folder = write_checkpoint(tmp_path / family, family, config=config)
    right, wrong = both_ways(folder, **fields)
    edit_json(folder / "config.json", **stored)
    with engine(folder, backend=backend) as loaded:
        found = states(loaded, SHORT)
    assert difference(found, right) <= TOLERANCE
    assert difference(found, wrong) > VISIBLE


@BACKENDS
def test_pplx_embeds_codes(backend, tmp_path):
    layout = Layout(modules=(*MEAN, Codes()), style="old")
    folder = write_checkpoint(tmp_path / "pplx-embed", "pplx-embed", sentence_transformers=layout)
    squashed = np.tanh(np.stack([rows.mean(0) for rows in both_ways(folder, model_type="qwen3")[0]]))
    sure = np.abs(squashed * 127 % 1 - 0.5) > 1e-3  # a difference of 1e-5 may round the others elsewhere
    assert sure.mean() > 0.99
    with engine(folder, backend=backend) as loaded:
        assert loaded.spec.codes and not loaded.spec.normalize
        vectors = loaded.embed(SHORT).embeddings
        codes = loaded.embed(SHORT[:1], output_dtype="int8").embeddings
        shifted = loaded.embed(SHORT, output_dtype="uint8").embeddings
        bits = loaded.embed(SHORT, output_dtype="ubinary").embeddings
        units = loaded.embed(SHORT, normalize=True).embeddings
    expected = np.rint(squashed * 127)
    assert (vectors == expected)[sure].all() and np.abs(vectors).max() > 60
    assert codes.dtype == np.int8 and (codes == vectors[:1]).all()
    assert shifted.dtype == np.uint8 and (shifted == vectors + 128).all()
    assert (bits == np.packbits(squashed >= 0, axis=-1)).all()  # the sign of what is rounded to 0, too
    assert np.abs(units - unit(vectors)).max() <= 1e-6
    plain = np.rint(127 * unit(np.stack([rows.mean(0) for rows in both_ways(folder, model_type="qwen3")[0]])))
    assert (vectors != plain).any()


def voyage(folder: Path, *, width: int = 64) -> np.ndarray:
    """Write a checkpoint with voyage-4-nano's projection, which is returned."""
    layout = Layout(modules=(*MEAN, Normalize()))
    write_checkpoint(folder, "qwen3", wrapped=True, sentence_transformers=layout)
    tensors = load_file(folder / "model.safetensors")
    projection = Noise(3).normal(width, 48) / np.float32(7)
    save_file({**tensors, "linear.weight": projection}, folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(folder / "config.json", auto_map=VOYAGE, num_labels=width, use_bidirectional_attention=True)
    return projection


@BACKENDS
@pytest.mark.parametrize(
    ("claimed", "auto_map"),
    [
        ("Qwen3ForCausalLM", VOYAGE),
        ("VoyageQwen3BidirectionalEmbedModel", None),
        ("VoyageQwen3BidirectionalEmbedModel", VOYAGE),
    ],
)
def test_voyages_projection(claimed, auto_map, backend, tmp_path):
    """By the code that its files name, by vLLM's class, or by both: the projection is one."""
    folder = tmp_path / "voyage-4-nano"
    projection = voyage(folder)
    right, wrong = ([unit(rows.mean(0) @ projection.T) for rows in way] for way in both_ways(folder))
    with engine(folder, backend=backend, hf_overrides={"architectures": [claimed], "auto_map": auto_map}) as loaded:
        assert loaded.spec.dimensions == 64
        assert loaded.spec.matryoshka_dimensions == (256, 512, 1024, 2048)
        vectors = loaded.embed(SHORT).embeddings
        rows = loaded.token_embed(SHORT, normalize=False).embeddings
    assert np.abs(vectors - np.stack(right)).max() <= TOLERANCE
    assert np.abs(vectors - np.stack(wrong)).max() > VISIBLE
    assert {row.shape[1] for row in rows} == {64}


def test_a_projection_that_the_weights_lack(tmp_path):
    folder = write_checkpoint(tmp_path / "voyage-4-nano", "qwen3")
    edit_json(folder / "config.json", auto_map=VOYAGE)
    with pytest.raises(WeightMismatchError, match=r"linear\.weight"):
        engine(folder)


@BACKENDS
def test_embeddinggemmas_dense_modules(backend, tmp_path):
    """Mean, two linear layers without activation or bias, unit length, as sentence-transformers computes them."""
    from sentence_transformers import SentenceTransformer

    dense = [Dense(out_features=width, activation="Identity", bias=False) for width in (192, 48)]
    layout = Layout(modules=(*MEAN, *dense, Normalize()))
    folder = write_checkpoint(tmp_path / "embeddinggemma", "gemma3-bidirectional", sentence_transformers=layout)
    own = SentenceTransformer(str(folder), device="cpu", model_kwargs={"attn_implementation": "eager"})
    expected = own.encode(list(SHORT), show_progress_bar=False)
    with engine(folder, backend=backend) as loaded:
        vectors = loaded.embed(SHORT).embeddings
    assert np.abs(vectors - expected).max() <= TOLERANCE
    entries = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([*entries[:2], *entries[4:]]))
    with engine(folder, backend=backend) as loaded:
        assert np.abs(loaded.embed(SHORT).embeddings - expected).max() > VISIBLE


# --- LFM2 -----------------------------------------------------------------------------------------------------------


def of_lfm2(folder: Path, **ways: bool) -> list[np.ndarray]:
    model = lfm2(folder, **ways)
    with torch.inference_mode():
        return [model(ids).numpy() for ids in ids_of(folder, TEXTS)]


@BACKENDS
@pytest.mark.parametrize(
    ("family", "stored", "bidirectional"),
    [
        ("lfm2", {}, False),
        ("lfm2-bidirectional", {}, True),
        ("lfm2-bidirectional", {"conv_L_cache": 4}, True),
        ("lfm2-bidirectional", {"auto_map": None}, True),  # `architectures` say it too
        ("lfm2-bidirectional", {"auto_map": None, "model_type": "lfm2_bidirectional"}, True),
        ("lfm2", {"is_causal": False}, True),
    ],
)
def test_lfm2s_convolutions(family, stored, bidirectional, backend, tmp_path):
    config = {key: value for key, value in stored.items() if key == "conv_L_cache"}
    folder = write_checkpoint(tmp_path / family, family, config=config)
    right = of_lfm2(folder, bidirectional=bidirectional)
    wrong = [
        of_lfm2(folder, bidirectional=attends, centred=centred)
        for attends, centred in ((True, True), (True, False), (False, True), (False, False))
        if (attends, centred) != (bidirectional, bidirectional)
    ]
    edit_json(folder / "config.json", **stored)
    with engine(folder, backend=backend) as loaded:
        found = states(loaded, TEXTS)
    assert difference(found, right) <= TOLERANCE
    assert min(difference(found, other) for other in wrong) > VISIBLE


@BACKENDS
@pytest.mark.parametrize("mode", ["cls", "lasttoken", "mean"])
def test_lfm2s_rows(mode, backend, tmp_path):
    """The last layer mixes rows too: the others may be dropped after it only."""
    layout = Layout(modules=(Pooling(modes=(mode,)), Normalize()))
    folder = write_checkpoint(tmp_path / "lfm2", "lfm2-bidirectional", sentence_transformers=layout)
    rows = of_lfm2(folder, bidirectional=True)
    read = {"cls": lambda row: row[0], "lasttoken": lambda row: row[-1], "mean": lambda row: row.mean(0)}[mode]
    with engine(folder, backend=backend) as loaded:
        vectors = loaded.embed(TEXTS).embeddings
    assert np.abs(vectors - unit(np.stack([read(row) for row in rows]))).max() <= TOLERANCE


def test_lfm2_colberts_are_the_same_in_both_backends(tmp_path):
    """Documents, and queries with tokens that nothing attends to or convolves."""
    folder = write_pylate(tmp_path / "colbert", "lfm2-bidirectional")
    scores = []
    for backend in ("native", "torch"):
        with engine(folder, backend=backend) as loaded:
            scores.append(loaded.score(TEXTS[3], list(TEXTS)).scores)
    assert np.abs(scores[0] - scores[1]).max() <= TOLERANCE * 10
