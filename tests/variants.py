"""Variants of encoders and decoders: their checkpoints, native encoders, and the states of transformers' classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.tiny import write_checkpoint

from millpond.backends.native.encoder import NativeEncoder, bounds_of
from millpond.backends.native.families import encoder_of
from millpond.backends.native.kernels import Precision, kernels_of
from millpond.checkpoints.architecture import Architecture
from millpond.checkpoints.architectures import find
from millpond.checkpoints.checkpoint import Checkpoint, read_checkpoint
from millpond.checkpoints.families.native import translate
from millpond.checkpoints.weights import stored_tensors

TOLERANCE = 1e-5  # of normalized states
VISIBLE = 1e-3  # a mistake must change them by more than this
# Unordered, with neighbours of equal length.
LENGTHS = (1, 1, 2, 17, 64, 64, 300, 17, 1, 31, 33, 63, 65, 7, 8, 9, 128, 129, 130, 40, 40)
EACH_LENGTH = (5, *range(64, 0, -1), 1, 1, 2, 40, 40, 40)
Fields = Mapping[str, Any]
Rows = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
Variant = tuple[str, Fields]

POSITIONS = {"max_position_embeddings": 512}
SIZE = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 192} | POSITIONS
WIDE_HEADS = {"hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 416} | POSITIONS
BIASES = {"norm_bias": True, "attention_bias": True, "mlp_bias": True}
NOMIC = SIZE | {"n_embd": 128, "n_head": 4, "n_inner": 192, "n_positions": 512, "max_trained_positions": 512}
LISTED = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
YARN = {"rope_type": "yarn", "rope_theta": 160000.0, "factor": 4.0, "original_max_position_embeddings": 16}


def two_bases(full: Fields) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": 50.0}
    return {"rope_parameters": {"full_attention": dict(full), "sliding_attention": local}}


# Name: family and fields of config.json.
ENCODERS: Mapping[str, Variant] = {
    "modernbert": ("modernbert", SIZE),
    "modernbert-heads-of-64": ("modernbert", WIDE_HEADS),
    "modernbert-heads-of-96": ("modernbert", SIZE | {"hidden_size": 192, "num_attention_heads": 2}),
    "modernbert-biases": ("modernbert", SIZE | BIASES),
    "modernbert-window-128": ("modernbert", SIZE | {"local_attention": 128}),
    "modernbert-window-of-one-neighbour": ("modernbert", SIZE | {"local_attention": 2}),
    "modernbert-window-of-itself": ("modernbert", SIZE | {"local_attention": 1}),
    "modernbert-window-beyond-all": ("modernbert", SIZE | {"local_attention": 5000}),
    "modernbert-all-global": ("modernbert", SIZE | {"global_attn_every_n_layers": 1}),
    "modernbert-mostly-local": ("modernbert", SIZE | {"global_attn_every_n_layers": 4, "num_hidden_layers": 6}),
    "modernbert-listed": ("modernbert", SIZE | {"layer_types": LISTED}),
    "modernbert-one-layer": ("modernbert", SIZE | {"num_hidden_layers": 1}),
    "modernbert-relu": ("modernbert", SIZE | BIASES | {"hidden_activation": "relu"}),
    "modernbert-gelu-new": ("modernbert", SIZE | {"hidden_activation": "gelu_new"}),
    "modernbert-sigmoid": ("modernbert", SIZE | BIASES | {"hidden_activation": "sigmoid"}),
    "modernbert-yarn": ("modernbert", SIZE | two_bases(YARN)),
    "nomic": ("nomic", NOMIC),
    "nomic-geglu": ("nomic", NOMIC | {"activation_function": "geglu"}),
    "nomic-glu": ("nomic", NOMIC | {"activation_function": "glu"}),
    "gte": ("gte", SIZE),
    "gte-without-types": ("gte-en", SIZE),
    "gte-heads-of-64": ("gte", WIDE_HEADS),
    "gte-of-its-own-scaling": ("gte-snowflake", SIZE | {"hidden_act": "gelu_new"}),
}
# 416: more than a chunk of the feed, and no multiple of it.
CAUSAL = SIZE | {"num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 416}
BIASED = {"attention_bias": True, "mlp_bias": True}
SCALED = {"factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0} | SCALED
WINDOWS = {"use_sliding_window": True, "sliding_window": 20, "layer_types": ["full_attention", "sliding_attention"]}
DECODERS: Mapping[str, Variant] = {
    "eurobert": ("eurobert", {}),
    "eurobert-biases": ("eurobert", BIASED),
    "llama": ("llama", {}),
    "llama-biases": ("llama", BIASED),
    "llama-one-key-head": ("llama", {"num_key_value_heads": 1}),
    "llama-as-many-key-heads": ("llama", {"num_key_value_heads": 4}),
    "llama-llama3": ("llama", {"rope_scaling": LLAMA3}),
    "llama-linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    "llama-gelu": ("llama", {"hidden_act": "gelu"}),
    "llama-window-it-does-not-have": ("llama", {"sliding_window": 3}),
    "llama-bidirectional": ("llama-bidirectional", {}),
    "internlm2": ("internlm2", {}),
    "mistral": ("mistral", {}),
    "mistral-wide-heads": ("mistral", {"head_dim": 64}),
    "mistral-window": ("mistral-sliding", {"sliding_window": 33}),
    "mistral-window-of-one": ("mistral", {"sliding_window": 1}),
    "qwen2": ("qwen2", {}),
    "qwen2-sliding": ("qwen2-sliding", {}),
    "qwen2-yarn": ("qwen2", {"rope_scaling": {"rope_type": "yarn", **SCALED}}),
    "qwen2-bidirectional": ("qwen2-bidirectional", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "qwen3-eight-heads": ("qwen3", {"num_attention_heads": 8}),
    "qwen3-heads-of-128": ("qwen3", {"head_dim": 128}),
    "qwen3-windows": ("qwen3", WINDOWS),
    "qwen3-bidirectional": ("qwen3", {"is_causal": False}),
    "qwen3-bidirectional-windows": ("qwen3", {**WINDOWS, "is_causal": False}),
    "gemma": ("gemma", {"num_key_value_heads": 1, "head_dim": 256}),
    "gemma-legacy-activation": ("gemma", {"hidden_act": "gelu"}),
    "gemma2": ("gemma2", {"sliding_window": 16}),
    "gemma2-no-softcap": ("gemma2", {"attn_logit_softcapping": None}),
    "gemma2-biases": ("gemma2", {"attention_bias": True}),
    "gemma3": ("gemma3", {"sliding_window": 65}),
    "gemma3-bidirectional": ("gemma3", {"use_bidirectional_attention": True, "sliding_window": 24}),
}
GROUPS = {"num_hidden_layers": 5, "num_hidden_groups": 2, "inner_group_num": 2}
# Sizes that the kernels fill up with zeros, layers that share weights, and an activation that no kernel computes.
OTHERS: Mapping[str, Variant] = {
    "albert": ("albert", POSITIONS),
    "albert-gelu": ("albert", POSITIONS | {"hidden_act": "gelu"}),
    "albert-groups": ("albert", POSITIONS | GROUPS),
    "llama-heads-of-20": ("llama", CAUSAL | {"head_dim": 20}),
    "llama-of-48-columns": ("llama", {}),
    "modernbert-of-48-columns": ("modernbert", POSITIONS),
    "modernbert-heads-of-16": ("modernbert", SIZE | {"num_attention_heads": 8}),
    "modernbert-mish": ("modernbert", SIZE | {"hidden_activation": "mish"}),
    "nomic-of-48-columns": ("nomic", {}),
    "gte-inner-width-100": ("gte", SIZE | {"intermediate_size": 100}),
}
# Names of the flash implementation, 5 adapters of rank 4 or none.
JINA = SIZE | {"max_position_embeddings": 514}
ADAPTED: Mapping[str, Fields] = {
    "jina": JINA,
    "jina-heads-of-64": JINA | {"num_attention_heads": 2},
    "jina-rank-16": JINA | {"lora_rank": 16},  # columns of more than one panel
    "jina-one-adapter": JINA | {"lora_adaptations": ["separation"], "lora_rank": 3},
    "jina-types": JINA | {"type_vocab_size": 2},
    "jina-wide-feed": JINA | {"intermediate_size": 992},  # in more than one piece
}
VARIANTS = ENCODERS | {name: (family, CAUSAL | fields) for name, (family, fields) in DECODERS.items()} | OTHERS
WITHOUT_PLAN = {"modernbert-mish"}
# Each has the layers of another variant, or is a setting that several families share.
SLOW = {"internlm2", "llama-bidirectional", "llama-linear", "mistral", "mistral-wide-heads", "qwen2", "qwen2-sliding"}
SLOW |= {"qwen2-bidirectional", "gemma2-biases", "gemma2-no-softcap"}


def write_variant(folder: Path, name: str) -> Path:
    """The checkpoint of a variant, or of one of jina's."""
    family, config = ("jina", ADAPTED[name]) if name in ADAPTED else VARIANTS[name]
    return write_checkpoint(folder, family, config=config)


def described(folder: Path) -> tuple[Checkpoint, Architecture]:
    """A checkpoint in the native terms, and its row."""
    checkpoint = read_checkpoint(str(folder))
    row = find(checkpoint.config, folder.name)
    return replace(checkpoint, config=translate(row, checkpoint.config, folder.name)), row


def native(folder: Path, isa: str | None = None, dtype: Precision = "float32", **options: Any) -> NativeEncoder:
    """The native encoder of a checkpoint with the kernels of an instruction set."""
    kernels = kernels_of(dtype, isa, **options)
    if kernels is None:
        pytest.skip(f"no kernels of {isa} in {dtype}")
    checkpoint, row = described(folder)
    return encoder_of(stored_tensors(folder), checkpoint, row, kernels)


@cache
def some_ids(lengths: tuple[int, ...]) -> Ints:
    """The ids of these texts, ``[tokens]``."""
    return np.random.default_rng(4).integers(5, 60, sum(lengths)).astype(np.int32)


def native_states(encoder: NativeEncoder, lengths: tuple[int, ...] = LENGTHS, **options: Any) -> Rows:
    """The states of these texts, ``[tokens, hidden]``."""
    return encoder.encode(some_ids(lengths), bounds_of(lengths), **options)


def apart(own: Rows, expected: Rows) -> float:
    """The largest difference of their rows at length 1."""
    assert own.shape == expected.shape
    one, other = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (own, expected))
    return float(abs(one - other).max())


def difference(own: Rows, expected: Rows) -> float:
    """The largest difference, relative to the largest value."""
    assert own.shape == expected.shape
    return float(abs(own - expected).max() / abs(expected).max())


def assert_same_direction(own: Rows, expected: Rows) -> None:
    """In half precision, and not in float32."""
    cosine = (own * expected).sum(1) / np.linalg.norm(own, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosine.mean() >= 0.999
    assert cosine.min() >= 0.99
    assert difference(own, expected) > TOLERANCE
