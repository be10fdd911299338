"""Packed rows compared with transformers' classes, one text at a time."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.parity.oracles import oracle
from tests.tiny import FAMILIES, MAX_TOKENS, TEXTS, write_checkpoint
from tests.tiny.columns import row_of
from tests.tiny.families import some

from millpond import Engine

TOLERANCE = 1e-5  # relative to the largest value of a text's states
VISIBLE = 1e-3  # a mistake must change the states by more than this
SHORT = tuple(text for text in TEXTS if len(text) < 130)

LANGUAGE_MODELS = {"ForCausalLM", "ForMaskedLM"}
UNREAD = ("position_ids", "attn.bias")  # buffers of older files

Matrices = Sequence[np.ndarray]


def ids_of(folder: Path, texts: Sequence[str], limit: int = MAX_TOKENS) -> list[torch.Tensor]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    return [torch.tensor(tokenizer(text, truncation=True, max_length=limit)["input_ids"]) for text in texts]


def expected_of(folder: Path, texts: Sequence[str]) -> Matrices:
    """transformers' states of each text alone."""
    reference = oracle(folder)
    with torch.inference_mode():
        return [reference(ids).numpy() for ids in ids_of(folder, texts)]


@pytest.fixture(scope="module")
def alone(plain: Callable[[str], Path]) -> Callable[[str], Matrices]:
    """transformers' states of each of the texts alone: eager attention, float32, no packing, no padding."""
    return cache(lambda family: expected_of(plain(family), TEXTS))


def difference(matrices: Matrices, expected: Matrices) -> float:
    """The largest difference over all texts, relative to the largest value of the text's expected states."""
    assert [matrix.shape for matrix in matrices] == [matrix.shape for matrix in expected]
    return max(
        float(np.abs(matrix - other).max() / np.abs(other).max())
        for matrix, other in zip(matrices, expected, strict=True)
    )


def states(engine: Engine, texts: Sequence[str]) -> list[np.ndarray]:
    return list(engine.token_embed(texts, normalize=False).embeddings)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_equals_transformers_one_text_at_a_time(family, engine_of, alone, record_property):
    expected = alone(family)
    lengths = [len(matrix) for matrix in expected]
    assert min(lengths) <= 3
    assert lengths.count(MAX_TOKENS) >= 2
    worst = difference(states(engine_of(family), TEXTS), expected)
    record_property("error", worst)
    assert worst <= TOLERANCE


@pytest.mark.parametrize("family", some())
def test_a_text_does_not_depend_on_its_batch(family, engine_of):
    engine = engine_of(family)
    vectors = engine.embed(TEXTS).embeddings
    assert np.abs(vectors - np.concatenate([engine.embed([text]).embeddings for text in TEXTS])).max() <= 1e-6
    batch = states(engine, TEXTS)
    one_by_one = [states(engine, [text])[0] for text in TEXTS]
    worst = difference(batch, one_by_one)
    assert worst <= TOLERANCE
    order = random.Random(3).sample(range(len(TEXTS)), len(TEXTS))
    for budget in (1, 90):  # every text by itself, and two or three together
        again = states(engine_of(family, max_batch_tokens=budget), [TEXTS[i] for i in order])
        worst = difference([again[order.index(i)] for i in range(len(TEXTS))], batch)
        assert worst <= TOLERANCE


@pytest.mark.parametrize("family", some())
def test_half_precision_points_the_same_way(family, engine_of, alone):
    """These large random weights amplify rounding more than trained ones; a mistake changes the direction far more."""
    actual = np.concatenate(states(engine_of(family, dtype="bfloat16"), TEXTS))
    expected = np.concatenate(alone(family))
    cosine = (actual * expected).sum(1) / np.linalg.norm(actual, axis=1) / np.linalg.norm(expected, axis=1)
    # A router may choose otherwise, Jamba's scan adds up in bfloat16, and Qwen3.5 normalizes what its delta rule gives,
    # however small: in transformers too, where these vectors turn as far.
    coarse = family in ("jamba", "qwen3.5", "qwen3-moe", "nomic-moe")
    assert cosine.mean() >= (0.99 if coarse else 0.999)
    assert cosine.min() >= (0.9 if coarse else 0.99)


def test_mpnets_relative_bias_at_distances_of_every_bucket(tmp_path):
    """Its buckets reach distances of 128 tokens, more than the other texts here have."""
    from transformers import AutoModel, AutoTokenizer

    texts = [" ".join(TEXTS), "a", " ".join(TEXTS[1:3])]
    folder = write_checkpoint(tmp_path / "mpnet", "mpnet", config={"max_position_embeddings": 402}, tokenizer_limit=400)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    reference = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = [reference(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].numpy() for text in texts]
    assert max(map(len, expected)) > 256
    with Engine(folder, dtype="float32", device="cpu") as engine:
        worst = difference(states(engine, texts), expected)
    assert worst <= TOLERANCE


@pytest.mark.parametrize("family", some(name for name in FAMILIES if not LANGUAGE_MODELS & row_of(name).refused.keys()))
def test_a_language_model_gives_its_backbone(family, engine_of, tmp_path):
    """``*ForCausalLM`` and ``*ForMaskedLM`` repositories: prefixed tensor names, and a head that is not loaded."""
    texts = SHORT[:3]
    folder = write_checkpoint(tmp_path / family, family, wrapped=True, seed=1)
    expected = expected_of(folder, texts)
    with Engine(folder, dtype="float32", device="cpu") as engine:
        actual = states(engine, texts)
    worst, other = difference(actual, expected), difference(actual, states(engine_of(family), texts))
    assert worst <= TOLERANCE
    assert other > VISIBLE  # other weights, so this checkpoint's backbone was read


@pytest.mark.contract
@pytest.mark.parametrize("family", some())
def test_every_tensor_of_a_tiny_checkpoint_moves_its_states(family, engine_of, tmp_path):
    """A mistake in a tensor without effect would not be detected by the tests above."""
    from safetensors.torch import load_file, save_file

    folder = write_checkpoint(tmp_path / family, family)
    tensors = load_file(folder / "model.safetensors")
    names = [
        name
        for name in tensors
        if not name.endswith(UNREAD) and not re.search(r"pooler\.|_global\.|vision_tower\.", name)
    ]
    right = states(engine_of(family), SHORT)
    # A key's bias adds the same number to all scores of a row, which softmax cancels.
    unseen = ("key.bias", "k_lin.bias", "attn.k.bias", "pos_key_proj.bias")
    for name in random.Random(0).sample(names, 5):
        moved = {**tensors, name: torch.flip(tensors[name], dims=(-1,)) + 0.1}
        save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
        with Engine(folder, dtype="float32", device="cpu") as engine:
            difference_made = difference(states(engine, SHORT), right)
        assert (difference_made > VISIBLE) != name.endswith(unseen), name


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_the_first_position_of_mpnet_does_not_depend_on_its_padding(backend, tmp_path):
    folder = write_checkpoint(tmp_path / "model", "mpnet")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": 0}), encoding="utf-8")
    right = expected_of(folder, TEXTS)
    with Engine(folder, dtype="float32", device="cpu", backend=backend) as engine:
        assert difference(states(engine, TEXTS), right) <= TOLERANCE
