"""Families that pad their vocabulary: the rows in the weights count, whatever config.json says about padding."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.tiny import TEXTS, edit_json, write_checkpoint
from tests.tiny.layouts import save_weights

from millpond import Engine, InvalidRequestError, PoolingParams, TokenIds, WeightMismatchError

MULTIPLE = 64
TABLES = ("word_embeddings.weight", "tok_embeddings.weight", "embed_tokens.weight")


def _write(folder: Path, family: str, weights: str) -> tuple[Path, int]:
    write_checkpoint(folder, family, weights=weights)
    return folder, json.loads((folder / "config.json").read_text())["vocab_size"]


def _resize(folder: Path, rows: int) -> None:
    """Add rows to the table of word vectors, or cut some off."""
    path = folder / "model.safetensors"
    tensors = load_file(path) if path.is_file() else _unpickled(folder / "pytorch_model.bin")
    for name, table in tensors.items():
        if "word_embeddings" in name and not name.endswith("lora_B"):  # lora_A [adapters, rows, rank] has rows, too
            more = np.full((*table.shape[:-2], max(0, rows - table.shape[-2]), table.shape[-1]), 7.0, np.float32)
            tensors[name] = np.concatenate((table, more), axis=-2)[..., :rows, :]
    save_weights(tensors, folder, "safetensors" if path.is_file() else "bin")


def _unpickled(path: Path) -> dict[str, np.ndarray]:
    import torch

    return {name: tensor.numpy() for name, tensor in torch.load(path, weights_only=True).items()}


def _vectors(folder: Path) -> np.ndarray:
    with Engine(folder, dtype="float32") as engine:
        return engine.embed(TEXTS).embeddings


@pytest.mark.parametrize("weights", ["safetensors", pytest.param("bin", marks=pytest.mark.torch)])
@pytest.mark.parametrize("family", ["nomic", "jina"])
@pytest.mark.parametrize("multiple", [1, MULTIPLE])
@pytest.mark.parametrize("counted", [False, True], ids=["vocab_size without padding", "vocab_size with padding"])
@pytest.mark.parametrize("stored", [False, True], ids=["rows without padding", "rows with padding"])
def test_the_rows_in_the_weights_decide(
    family: str, weights: str, multiple: int, counted: bool, stored: bool, tmp_path: Path
) -> None:
    folder, size = _write(tmp_path / "model", family, weights)
    expected = _vectors(folder)
    assert size % MULTIPLE, "padding would add no row"
    padded = -(-size // MULTIPLE) * MULTIPLE
    edit_json(folder / "config.json", pad_vocab_size_multiple=multiple, vocab_size=padded if counted else size)
    if stored:
        _resize(folder, padded)
    if multiple == 1 and counted and not stored:
        with pytest.raises(WeightMismatchError, match="word_embeddings"):  # nothing says that there is padding
            Engine(folder, dtype="float32")
        return
    assert (_vectors(folder) == expected).all()


@pytest.mark.parametrize("family", ["nomic", "jina"])
def test_token_ids_are_checked_against_the_rows(family: str, tmp_path: Path) -> None:
    folder, size = _write(tmp_path / "model", family, "safetensors")
    edit_json(folder / "config.json", pad_vocab_size_multiple=MULTIPLE)
    with Engine(folder, dtype="float32") as engine:
        engine.submit("embed", [TokenIds((size - 1,))], PoolingParams()).result()
        with pytest.raises(InvalidRequestError, match=str(size)):
            engine.submit("embed", [TokenIds((size,))], PoolingParams())


@pytest.mark.parametrize("family", ["nomic", "jina", "bert"])
def test_rows_that_padding_does_not_explain_are_refused(family: str, tmp_path: Path) -> None:
    folder, size = _write(tmp_path / "model", family, "safetensors")
    if family != "bert":
        edit_json(folder / "config.json", pad_vocab_size_multiple=MULTIPLE)
    _resize(folder, size - MULTIPLE)
    with pytest.raises(WeightMismatchError, match="word_embeddings"):
        Engine(folder, dtype="float32")


@pytest.mark.parametrize("backend", ["native", pytest.param("torch", marks=pytest.mark.torch)])
@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3"])
def test_a_table_under_any_name_may_be_padded_in_either_direction(family: str, backend: str, tmp_path: Path) -> None:
    folder, size = _write(tmp_path / "model", family, "safetensors")
    with Engine(folder, dtype="float32", backend=backend) as engine:
        expected = engine.embed(TEXTS).embeddings
    padded = -(-size // MULTIPLE) * MULTIPLE
    for counted, stored in ((padded, size), (size, padded)):
        edit_json(folder / "config.json", pad_vocab_size_multiple=MULTIPLE, vocab_size=counted)
        tensors = load_file(folder / "model.safetensors")
        name = next(name for name in tensors if name.endswith(TABLES))
        more = np.full((max(0, stored - size), tensors[name].shape[1]), 7.0, np.float32)
        save_weights({**tensors, name: np.concatenate((tensors[name][:size], more))}, folder, "safetensors")
        with Engine(folder, dtype="float32", backend=backend) as engine:
            np.testing.assert_array_equal(engine.embed(TEXTS).embeddings, expected)
