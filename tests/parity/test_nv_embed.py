"""NV-Embed: Mistral without its mask, attention of each token to an array of latents, and a mean of the text alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tests.parity.latent_attention_oracle import nv_embed
from tests.parity.test_backbones import SHORT, TOLERANCE, VISIBLE, difference, ids_of, states
from tests.tiny import TEXTS, drop_tensor, edit_json, write_checkpoint
from tests.tiny.checkpoints import token_id

from millpond import Engine
from millpond.errors import ModelLoadError, WeightMismatchError

BACKENDS = pytest.mark.parametrize("backend", ["native", "torch"])
PROMPT = "The wheel turns. "
BRIEF = tuple(text for text in SHORT if len(text) < 60)


def engine(folder: Path, **options: Any) -> Engine:
    return Engine(folder, dtype="float32", device="cpu", **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As it is on the hub: with code of its own, and an end token that its code appends."""
    place = write_checkpoint(tmp_path / "NV-Embed-v2", "nv-embed", template="<s> $A")
    code = {"AutoConfig": "configuration_nvembed.NVEmbedConfig", "AutoModel": "modeling_nvembed.NVEmbedModel"}
    edit_json(place / "config.json", auto_map=code, add_eos=True)
    return place


def ended(folder: Path, texts: tuple[str, ...]) -> list[torch.Tensor]:
    end = torch.tensor([token_id(folder, "</s>")])
    return [torch.cat((ids, end)) for ids in ids_of(folder, texts)]


def expected(folder: Path, ids: list[torch.Tensor], **mistakes: bool) -> list[np.ndarray]:
    config = json.loads((folder / "config.json").read_text())
    reference = nv_embed(folder, config, **mistakes)
    with torch.inference_mode():
        return [reference(each).numpy() for each in ids]


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


@BACKENDS
def test_the_rows_are_those_of_its_code(backend, folder):
    ids = ended(folder, SHORT)
    with engine(folder, backend=backend) as loaded:
        found = states(loaded, SHORT)
    assert difference(found, expected(folder, ids)) <= TOLERANCE
    for mistake in ({"causal": True}, {"residual": False}, {"swapped": True}, {"latent": False}):
        assert difference(found, expected(folder, ids, **mistake)) > VISIBLE, mistake


@BACKENDS
def test_a_vector_is_the_mean_without_the_instruction(backend, folder):
    (prompt,) = ids_of(folder, (PROMPT,))
    ids = ended(folder, tuple(PROMPT + text for text in BRIEF))
    rows = expected(folder, ids)
    right = unit(np.stack([row[len(prompt) :].mean(0) for row in rows]))
    whole = unit(np.stack([row.mean(0) for row in rows]))
    with engine(folder, backend=backend) as loaded:
        assert loaded.spec.tasks >= {"embed"} and loaded.spec.normalize
        found = loaded.embed(BRIEF, prompt=PROMPT).embeddings
    assert np.abs(found - right).max() <= TOLERANCE
    assert np.abs(found - whole).max() > VISIBLE


def test_more_rows_than_pass_at_a_time(folder):
    texts = [" ".join(TEXTS[1:4])] * 40
    with engine(folder, backend="native") as loaded:
        together = loaded.embed(texts).embeddings
        alone = loaded.embed(texts[:1]).embeddings
        assert sum(loaded.count_tokens(texts)) > 1024
    assert np.abs(together - alone).max() <= 1e-6


def test_the_end_token_is_that_of_the_config(folder):
    with engine(folder) as loaded:
        with_end = loaded.count_tokens(["a"])[0]
    edit_json(folder / "config.json", add_eos=False)
    with engine(folder) as loaded:
        assert loaded.count_tokens(["a"])[0] == with_end - 1


def test_an_end_token_of_the_tokenizer_is_not_repeated(tmp_path):
    place = write_checkpoint(tmp_path / "NV-Embed-v1", "nv-embed", template="<s> $A </s>", config={"add_eos": True})
    (ids,) = ids_of(place, ("a",))
    with engine(place) as loaded:
        assert loaded.count_tokens(["a"])[0] == len(ids)


@BACKENDS
def test_a_tensor_that_the_weights_lack(backend, folder):
    drop_tensor(folder, "latent_attention_model.latents")
    with pytest.raises(WeightMismatchError, match=r"latent_attention_model\.latents"):
        engine(folder, backend=backend)


@BACKENDS
def test_a_tensor_of_another_shape(backend, folder):
    tensors = load_file(folder / "model.safetensors")
    name = "latent_attention_model.cross_attend_blocks.0.fn.to_q.weight"
    save_file({**tensors, name: tensors[name][:-1].copy()}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightMismatchError, match=r"to_q\.weight"):
        engine(folder, backend=backend)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"text_config": None}, "text_config is None"),
        ({"latent_attention_config": [3]}, "latent_attention_config is"),
        ({"latent_attention_config": {"num_cross_heads": 0}}, "num_cross_heads of latent_attention_config is 0"),
        ({"latent_attention_config": {"latent_dim": 12}}, "latents of 12"),
    ],
)
def test_a_config_that_cannot_be_read(fields, said, folder):
    edit_json(folder / "config.json", **fields)
    with pytest.raises(ModelLoadError, match=said):
        engine(folder)
