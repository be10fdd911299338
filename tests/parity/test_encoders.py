"""Relatives of BERT in both backends against transformers' classes on a padded batch; likely mistakes must show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.parity.test_backbones import SHORT, TOLERANCE, VISIBLE, difference, ids_of, states
from tests.tiny import MAX_TOKENS, TEXTS, write_checkpoint
from transformers import AutoModel

from millpond import Engine
from millpond.errors import UnsupportedArchitectureError

BACKENDS = ("native", "torch")


def padded(
    folder: Path, texts: Sequence[str], change: Callable[[Any], Any] = lambda model: None, *, limit: int = MAX_TOKENS
) -> list[np.ndarray]:
    """The states of transformers' class, from all texts in one padded batch.

    ``change`` may change the loaded model, and returns more arguments of a call, if any.
    """
    model = AutoModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.inference_mode():
        given = change(model) or {}
        ids = ids_of(folder, texts, limit)
        batch = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=model.config.pad_token_id)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
        hidden = model(input_ids=batch, attention_mask=mask, **given).last_hidden_state
    return [rows[: len(row)].numpy() for rows, row in zip(hidden, ids, strict=True)]


def _from_zero(model: Any) -> dict[str, torch.Tensor]:
    return {"position_ids": torch.arange(MAX_TOKENS)[None]}


def _without_task(model: Any) -> None:
    model.embeddings.task_type_embeddings.weight.zero_()


def _without_last_norm(name: str) -> Callable[[Any], None]:
    return lambda model: setattr(model.encoder, name, torch.nn.Identity())


def _halves(model: Any) -> None:
    """As if the first half of a head's columns and the second were pairs."""
    heads = model.config.num_attention_heads
    for layer in model.encoder.layer:
        for part in (layer.attention.self.query, layer.attention.self.key):
            for tensor in (part.weight, part.bias):
                halves = tensor.view(heads, 2, -1, *tensor.shape[1:])
                tensor.copy_(halves.transpose(1, 2).reshape(tensor.shape).clone())


def _without_projection_bias(model: Any) -> None:
    model.encoder.embedding_hidden_mapping_in.bias.zero_()


def _modernberts_angles(model: Any) -> None:
    """As if its windows had the base of ModernBERT's."""
    rotary = model.rotary_emb
    rotary.sliding_attention_inv_freq = 1 / 10_000.0 ** (torch.arange(0, 12, 2) / 12)


# The likely mistake of each family.
MISTAKES: dict[str, Callable[[Any], Any]] = {
    "ernie": _without_task,
    "camembert": _from_zero,
    "data2vec": _from_zero,
    "megatron": _without_last_norm("ln"),
    "xlm-roberta-xl": _without_last_norm("LayerNorm"),
    "mmbert": _modernberts_angles,
    "roformer": _halves,
    "rembert": _without_projection_bias,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", MISTAKES)
def test_a_family_equals_transformers(family, backend, plain, record_property):
    folder = plain(family)
    with Engine(folder, dtype="float32", device="cpu", backend=backend) as engine:
        found = states(engine, TEXTS)
    worst = difference(found, padded(folder, TEXTS))
    record_property("error", worst)
    assert worst <= TOLERANCE
    texts = [max(TEXTS, key=len)]  # of MAX_TOKENS tokens
    with Engine(folder, dtype="float32", device="cpu", backend=backend) as engine:
        assert difference(states(engine, texts), padded(folder, texts, MISTAKES[family])) > VISIBLE


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["megatron", "xlm-roberta-xl", "roformer"])
def test_bfloat16_points_the_same_way(family, backend, plain):
    folder = plain(family)
    with Engine(folder, dtype="bfloat16", device="cpu", backend=backend) as engine:
        found = np.concatenate(states(engine, TEXTS))
    expected = np.concatenate(padded(folder, TEXTS))
    cosine = (found * expected).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosine.mean() >= 0.999
    assert cosine.min() >= 0.99


@pytest.mark.parametrize("backend", BACKENDS)
def test_ernie_without_tasks(backend, tmp_path):
    """ERNIE 1 has no table of them."""
    folder = write_checkpoint(tmp_path / "model", "ernie", config={"use_task_id": False})
    with Engine(folder, dtype="float32", device="cpu", backend=backend) as engine:
        assert difference(states(engine, SHORT), padded(folder, SHORT)) <= TOLERANCE


@pytest.mark.parametrize("backend", BACKENDS)
def test_far_positions_of_roformer(backend, tmp_path):
    """Its angles are not rounded, which shows where they are large."""
    texts = [" ".join(TEXTS) * 4, "a"]
    config = {"max_position_embeddings": 1536}
    folder = write_checkpoint(tmp_path / "model", "roformer", config=config, tokenizer_limit=1536)
    expected = padded(folder, texts, limit=1536)
    assert len(expected[0]) > 1000
    with Engine(folder, dtype="float32", device="cpu", backend=backend) as engine:
        assert difference(states(engine, texts), expected) <= TOLERANCE


def test_rotated_values_are_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "roformer", config={"rotary_value": True})
    with pytest.raises(UnsupportedArchitectureError, match="rotary_value true .* does not run for RoFormer"):
        Engine(folder, device="cpu")
