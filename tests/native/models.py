"""Native plans of one step, variants of encoders and decoders, and their states by torch and by the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from millpond.backends.torch.attention.segments import Segments
from millpond.backends.torch.forwards.linear import plain_linears
from millpond.backends.torch.load import load_backbone
from millpond.backends.torch.native import families, self_check, structs
from millpond.backends.torch.native.encoder import NativeEncoder, bounds_of
from millpond.backends.torch.native.kernels import kernels_of
from millpond.backends.torch.native.plan import PlanBuilder
from millpond.checkpoints.architectures import find
from millpond.checkpoints.checkpoint import read_checkpoint
from millpond.checkpoints.families.native import translate
from millpond.native import library
from millpond.native.library import isa

# --- Native plans of one step, and the same step in float64 -----------------------------------------------------------


# The precision of each instruction set's own kernels.
PRECISIONS = {
    name: torch.bfloat16 if kernels_of(torch.bfloat16, name) is not None else torch.float32 for name in library.ISAS
}
# What a rounding to the precision of the states changes at most, relatively.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}


def has(isa):
    """Whether this processor, and the library, have an instruction set."""
    return library.isa(isa) == isa


def marks_of(isa):
    """Those of a test of an instruction set: it is slow if this processor has a better one of the same precision."""
    missing = pytest.mark.skipif(not has(isa), reason=f"no {isa}")
    best = [other for other in PRECISIONS if has(other) and PRECISIONS[other] == PRECISIONS[isa]][-1:]
    return [missing] if isa in best else [missing, pytest.mark.slow]


every_isa = pytest.mark.parametrize("isa", [pytest.param(isa, marks=marks_of(isa)) for isa in PRECISIONS])


def linear(weight, bias=None):
    """What a plan reads of a linear layer."""
    return SimpleNamespace(weight=weight, bias=bias)


def identity(columns):
    """A product that copies."""
    return linear(torch.eye(columns))


def copied():
    return structs.NormWeights(kind=structs.COPY)


def encoder_of(isa, *calls):
    """An encoder of the steps that ``calls`` add to a builder."""
    dtype = PRECISIONS[isa]
    builder = PlanBuilder(kernels_of(dtype, isa), dtype)
    for call in calls:
        call(builder)
    return NativeEncoder(builder.build())


def numbers(shape, dtype, seed=0, scale=1.0):
    """Normally distributed numbers that the precision has."""
    drawn = torch.from_numpy(np.random.default_rng(seed).standard_normal(shape) * scale)
    return drawn.to(dtype).float()


def integers(shape, seed=0, share=1.0):
    """-1, 0 and 1, all but ``share`` of them 0: their products have no rounding in any precision."""
    random = np.random.default_rng(seed)
    drawn = random.integers(-1, 2, shape) * (random.random(shape) < share)
    return torch.from_numpy(drawn).float()


def given(rows):
    """Steps that make ``rows`` the states: token ``i`` has row ``i``."""

    def add(builder):
        builder.embed(rows)
        builder.norm(copied(), rows.shape[1])

    return add


def tokens(count):
    """The ids of `given`'s rows."""
    return np.arange(count, dtype=np.int32)


def one_text(count):
    return bounds_of([count])


def encoded(encoder, count, lengths=None, **options):
    """The encoder's result for the rows of `given`, in float64."""
    bounds = bounds_of([count] if lengths is None else lengths)
    return encoder.encode(tokens(count), bounds, **options).double()


def assert_near(result, expected, bound):
    """Every number within its own bound of the expected one; NaN where that is expected."""
    unknown = expected.isnan()
    assert torch.equal(result.isnan(), unknown), (result, expected)
    same = result == expected  # infinities
    off = torch.where(same | unknown, 0.0, (result - expected).abs() - bound)
    worst = off.argmax()
    assert off.max() <= 0, (result.flatten()[worst], expected.flatten()[worst], torch.as_tensor(bound).max())


MODELS = {"post-norm": self_check.post_norm, "pre-norm": self_check.pre_norm}


# --- Variants of encoders and decoders; the states of transformers' class, of torch's operators and of the kernels ----


TOLERANCE = 1e-5  # of normalized states
VISIBLE = 1e-3  # a mistake must change them by more than this
# Unordered, with neighbours of equal length.
LENGTHS = (1, 1, 2, 17, 64, 64, 300, 17, 1, 31, 33, 63, 65, 7, 8, 9, 128, 129, 130, 40, 40)
EACH_LENGTH = (5, *range(64, 0, -1), 1, 1, 2, 40, 40, 40)
Fields = Mapping[str, Any]
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
# What only torch's operators compute.
TORCH_ONLY: Mapping[str, Variant] = {
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
NATIVE = ENCODERS | {name: (family, CAUSAL | fields) for name, (family, fields) in DECODERS.items()}
VARIANTS = NATIVE | TORCH_ONLY
# Each has the layers of another variant, or is a setting that several families share.
SLOW = {"internlm2", "llama-bidirectional", "llama-linear", "mistral", "mistral-wide-heads", "qwen2", "qwen2-sliding"}
SLOW |= {"qwen2-bidirectional", "gemma2-biases", "gemma2-no-softcap"}
# Instruction set and precision.
TARGETS = [
    pytest.param(name, dtype, marks=marks_of(name), id=f"{name}-{str(dtype).removeprefix('torch.')}")
    for name, dtype in PRECISIONS.items()
]
compiled = pytest.mark.skipif(isa() is None, reason="no compiled kernels")


def backbone(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """The backbone that the engine loads, in torch; ``packed=False``: transformers' class."""
    checkpoint = read_checkpoint(folder)
    row = find(checkpoint.config, folder.name)
    checkpoint = replace(checkpoint, config=translate(row, checkpoint.config, folder.name))
    return load_backbone(checkpoint, row, device=torch.device("cpu"), dtype=dtype, **options)


def plain(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """What a native plan is made of; the plan of a decoder takes its layers."""
    with plain_linears():
        return backbone(folder, dtype)


loaded = cache(plain)  # an encoder, which no test changes


def plan_of(module: nn.Module, highest: str | None = None, dtype: torch.dtype = torch.float32) -> NativeEncoder:
    kernels = kernels_of(dtype, highest)
    assert kernels is not None
    return families.encoder_of(module, kernels, dtype)


def some_ids(lengths: tuple[int, ...]) -> torch.Tensor:  # [tokens]
    return torch.randint(5, 60, (sum(lengths),), generator=torch.Generator().manual_seed(4))


@torch.inference_mode()
def states(
    module: nn.Module, lengths: tuple[int, ...] = LENGTHS, types: torch.Tensor | None = None, **options: Any
) -> torch.Tensor:
    """The states ``[tokens, hidden]`` of a backbone, called as the engine calls those in torch's operators."""
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    row: dict[str, Any] = {"position_ids": positions, "segments": Segments.of(lengths), **options}
    if types is not None:
        row["token_type_ids"] = types[None]
    return module(input_ids=some_ids(lengths)[None], **row).last_hidden_state[0]


@cache
def expected_states(
    folder: Path, lengths: tuple[int, ...] = LENGTHS, types: torch.Tensor | None = None
) -> torch.Tensor:
    """Those of transformers' class in float32."""
    module = backbone(folder, packed=False)
    assert type(module).__module__.startswith("transformers.")
    return states(module, lengths, types)


def native_states(encoder: NativeEncoder, lengths: tuple[int, ...] = LENGTHS, **options: Any) -> torch.Tensor:
    return encoder.encode(some_ids(lengths).int().numpy(), bounds_of(lengths), **options)


def apart(own: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of their rows at length 1."""
    assert own.shape == expected.shape
    return float((nn.functional.normalize(own) - nn.functional.normalize(expected)).abs().max())


def difference(own: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest value."""
    assert own.shape == expected.shape
    return float((own - expected).abs().max() / expected.abs().max())


def assert_same_direction(own: torch.Tensor, expected: torch.Tensor) -> None:
    """In half precision, and not in float32."""
    cosine = torch.cosine_similarity(own.float(), expected, dim=-1)
    assert cosine.mean() >= 0.999
    assert cosine.min() >= 0.99
    assert difference(own.float(), expected) > TOLERANCE
