"""DeBERTa in the native backend: the terms of its attention, and each form of checkpoint beside transformers' class."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.native.models import PRECISIONS
from tests.pairwise import pairwise
from tests.tiles import emulated_table, emulates
from tests.tiny import write_checkpoint

from millpond.backends.native import structs
from millpond.backends.native.encoder import NativeEncoder, bounds_of
from millpond.backends.native.families import encoder_of, missing_plan
from millpond.backends.native.kernels import Kernels, kernels_of
from millpond.backends.native.packing.weight_packer import Linear, tensor_of
from millpond.backends.native.plans.distances import DistanceColumns, Distances, DistanceTerms
from millpond.backends.native.plans.plan import PlanBuilder
from millpond.checkpoints.architectures import find
from millpond.checkpoints.checkpoint import read_checkpoint
from millpond.checkpoints.families.native import translate
from millpond.checkpoints.weights import stored_tensors
from millpond.native import library

pytestmark = pytest.mark.contract

# The kernels of each instruction set and precision.
KERNELS = [
    pytest.param(isa, dtype, id=f"{isa}-{dtype}", marks=pytest.mark.skipif(library.isa(isa) != isa, reason=f"no {isa}"))
    for isa, dtype in PRECISIONS.items()
]
every_kernel = pytest.mark.parametrize(("isa", "dtype"), KERNELS)
# Around a vector, a group of rows, a block of them, and what threads divide a text by.
LENGTHS = (1, 2, 5, 8, 17, 31, 32, 33, 63, 97, 130, 191, 192, 193, 600)
DISTANCES = {
    "v3": Distances(span=256, buckets=True, farthest=512),
    "few": Distances(span=8, buckets=True, farthest=100),
    "steep": Distances(span=64, buckets=True, farthest=50),  # between far distances are buckets that none has
    "none": Distances(span=20, buckets=False, farthest=20),
}


def numbers(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Normally distributed numbers that the precision has."""
    drawn = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return drawn if dtype == "float32" else (drawn.view(np.uint32) >> 16 << 16).view(np.float32)


def attention_of(
    kernels: Kernels, rows: np.ndarray, terms: DistanceTerms, *, heads: int, dim: int, scale: float
) -> NativeEncoder:
    """An encoder whose states are the attention of ``rows [tokens, 3 heads dim]``; token ``i`` has row ``i``."""
    builder, width, whole = PlanBuilder(kernels), heads * dim, 3 * heads * dim
    copied = structs.NormWeights(kind=structs.COPY)
    builder.embed(tensor_of(rows))
    builder.norm(copied, whole)
    builder.heads(Linear(weight=tensor_of(np.eye(whole))))
    builder.attention(heads=heads, kv_heads=heads, dim=dim, scale=scale, distances=terms)
    builder.o_proj(Linear(weight=tensor_of(np.eye(width))))
    builder.norm(copied, width)
    return NativeEncoder(builder.build())


SHAPES = {"2x32": (2, 32), "2x64": (2, 64), "1x96": (1, 96)}


@every_kernel
@pairwise(shape=SHAPES, used=["both", "keys", "queries"], distances=DISTANCES)
def test_the_terms_of_distances_are_those_of_the_formula(isa, dtype, shape, used, distances):
    (heads, dim), count, kernels = shape, sum(LENGTHS), kernels_of(dtype, isa)
    assert kernels is not None
    rows = numbers((count, 3 * heads * dim), dtype)
    keys, queries = (numbers((2 * distances.span, heads * dim), dtype, seed) for seed in (1, 2))
    tables = (None if used == "queries" else keys, None if used == "keys" else queries)
    parts = [None if table is None else tensor_of(table) for table in tables]
    terms = DistanceTerms(columns=DistanceColumns.of(distances), keys=parts[0], queries=parts[1])
    scale = (3 * dim) ** -0.5
    encoder = attention_of(kernels, rows, terms, heads=heads, dim=dim, scale=scale)
    bounds, ids = bounds_of(LENGTHS), np.arange(count, dtype=np.int32)
    for limits in (None, np.array([length - length // 3 for length in LENGTHS], dtype=np.int32)):
        found = encoder.encode(ids, bounds, keys=limits)[:, : heads * dim]
        assert np.array_equal(found, encoder.encode(ids, bounds, keys=limits, threads=3)[:, : heads * dim])
        for i, length in enumerate(LENGTHS):
            text = rows[bounds[i] : bounds[i + 1]].astype(np.float64).reshape(length, 3, heads, dim)
            seen = length if limits is None else int(limits[i])
            expected, size = attended(text, tables, distances, scale, seen)
            bound = (3e-5 if dtype == "float32" else 3 * 2.0**-8) * size + 2.0**-8 * abs(expected) * (
                dtype != "float32"
            )
            assert (abs(found[bounds[i] : bounds[i + 1]] - expected) <= bound).all(), length


def attended(text, tables, distances, scale, count):
    """The formula, each distance by itself: the result, and that of the values' magnitudes."""
    query, key, value = text.swapaxes(0, 1)  # [tokens, heads, dim]
    place = np.arange(len(query))
    rows = distances.rows(place[:, None] - place)  # [queries, keys]
    scores = np.einsum("qhd,khd->hqk", query, key)
    for states, side, table in zip((query, key), ("qhd", "khd"), tables, strict=True):
        if table is not None:
            at = table.astype(np.float64).reshape(-1, *key.shape[1:])[rows]
            scores += np.einsum(f"{side},qkhd->hqk", states, at)
    scores = scores[:, :, :count] * scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return tuple(
        np.einsum("hqk,khd->qhd", weights, part[:count]).reshape(len(query), -1) for part in (value, abs(value))
    )


@emulates[0]
@emulates[1]
def test_tiles_equal_the_kernel_of_pairs(tmp_path):
    """Those of AMX, emulated."""
    table, pairs = emulated_table(tmp_path), kernels_of("bfloat16", "avx512bf16")
    assert pairs is not None
    tiles = replace(
        pairs,
        encode=table.encode_bfloat16,
        workspace=table.encoder_workspace_bfloat16,
        tiles=True,
    )
    heads, dim = 2, 64
    rows = numbers((sum(LENGTHS), 3 * heads * dim), "bfloat16")
    for distances in DISTANCES.values():
        drawn = [tensor_of(numbers((2 * distances.span, heads * dim), "bfloat16", seed)) for seed in (1, 2)]
        for keys, queries in (drawn, (drawn[0], None), (None, drawn[1])):
            terms = DistanceTerms(columns=DistanceColumns.of(distances), keys=keys, queries=queries)
            shape = {"heads": heads, "dim": dim, "scale": (3 * dim) ** -0.5}
            found, expected = (
                attention_of(kernels, rows, terms, **shape).encode(
                    np.arange(len(rows), dtype=np.int32), bounds_of(LENGTHS), threads=threads
                )
                for kernels, threads in ((tiles, 2), (pairs, 1))
            )
            assert (np.linalg.norm(found - expected, axis=1) <= 0.01 * np.linalg.norm(expected, axis=1)).all()


@pytest.mark.parametrize("distances", DISTANCES.values(), ids=DISTANCES)
def test_the_columns_of_distances_hold_their_rows_in_order(distances):
    columns = DistanceColumns.of(distances)
    away = np.arange(-columns.reach, columns.reach + 1)
    for rows, places, sign in zip(columns.rows, columns.columns, (-1, 1), strict=True):
        assert np.array_equal(rows[places], distances.rows(sign * away))
        assert np.isin(np.diff(places), (0, 1)).all()
        assert len(set(places[:32])) == len(set(places[-32:])) == 1
        assert places[columns.reach] % 32 == len(rows) % 32 == 0
    far = np.array([-(10**6), 10**6])
    assert np.array_equal(columns.rows[1][columns.columns[1][[0, -1]]], distances.rows(far))


# --- Checkpoints ------------------------------------------------------------------------------------------------------

TOLERANCE, VISIBLE = 1e-5, 1e-3  # of normalized states; each field of config.json must change them by more than that
SIZE = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 192, "max_position_embeddings": 600}
FORMS: dict[str, dict[str, Any]] = {
    "few buckets": {},
    "v3": {"position_buckets": 256, "max_position_embeddings": 512},
    "own position projections": {"share_att_key": False},
    "content to position": {"pos_att_type": ["c2p"]},
    "position to content": {"pos_att_type": "p2c", "share_att_key": False},
    "no terms": {"pos_att_type": []},
    "distances without buckets": {"position_buckets": -1},
    "distances cut": {"position_buckets": -1, "max_relative_positions": 20},
    "steep buckets": {"position_buckets": 64, "max_relative_positions": 50},
    "positions in the input too": {"position_biased_input": True, "type_vocab_size": 2},
    "plain distances": {"norm_rel_ebd": "none"},
    "no distances": {"relative_attention": False, "position_biased_input": True},
    "narrow embeddings": {"embedding_size": 32},
    "heads of 64": {"num_attention_heads": 2},
    "relu": {"hidden_act": "relu"},
}
TEXT_LENGTHS = (1, 300, 2, 17, 33, 600, 65, 1, 128)
IDS = np.random.default_rng(4).integers(5, 60, sum(TEXT_LENGTHS)).astype(np.int32)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    root = tmp_path_factory.mktemp("deberta")
    return cache(lambda form: write_checkpoint(root / form.replace(" ", "-"), "deberta-v2", config=SIZE | FORMS[form]))


def native(folder: Path, isa: str | None, dtype: str, **options: Any) -> NativeEncoder:
    checkpoint = read_checkpoint(folder)
    row = find(checkpoint.config, folder.name)
    checkpoint = replace(checkpoint, config=translate(row, checkpoint.config, folder.name))
    kernels = kernels_of(dtype, isa, **options)
    assert kernels is not None
    return encoder_of(stored_tensors(folder), checkpoint, row, kernels)


@cache
def expected(folder: Path) -> np.ndarray:
    """The states of transformers' class, text by text."""
    import torch
    from transformers import DebertaV2Model

    model = DebertaV2Model.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        texts = torch.from_numpy(IDS).long().split(TEXT_LENGTHS)
        return torch.cat([model(input_ids=text[None]).last_hidden_state[0] for text in texts]).numpy()


def normalized(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@every_kernel
@pytest.mark.parametrize("form", FORMS)
def test_every_form_equals_transformers_class(form, isa, dtype, folder_of):
    found = normalized(native(folder_of(form), isa, dtype).encode(IDS, bounds_of(TEXT_LENGTHS)))
    own = normalized(expected(folder_of(form)))
    if dtype == "bfloat16":
        cosines = (found * own).sum(1)
        assert cosines.mean() >= 0.9995 and cosines.min() >= 0.999
        assert abs(found - own).max() > TOLERANCE
        return
    assert abs(found - own).max() <= TOLERANCE
    assert form == "few buckets" or abs(found - normalized(expected(folder_of("few buckets")))).max() > VISIBLE


def test_eight_bits_leave_the_distances_exact(folder_of):
    if kernels_of("float32", int8="all") is None:
        pytest.skip("no kernels of eight bits")
    found = normalized(native(folder_of("v3"), None, "float32", int8="all").encode(IDS, bounds_of(TEXT_LENGTHS)))
    cosines = (found * normalized(expected(folder_of("v3")))).sum(1)
    assert 0.99 <= cosines.min() < 1 - TOLERANCE


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"conv_kernel_size": 3, "conv_act": "gelu"}, "convolution"),
        ({"hidden_act": "tanh"}, "tanh"),
        ({"embedding_size": 32, "type_vocab_size": 2}, "other columns than the words"),
        ({"position_buckets": 64, "max_relative_positions": 33}, "position_buckets=64"),
    ],
)
def test_what_has_no_plan_says_why_by_its_config_alone(config, reason, tmp_path):
    folder = write_checkpoint(tmp_path / "model", "deberta-v2", config=SIZE)
    whole = read_checkpoint(folder).config | config
    row = find(whole, "model")
    assert missing_plan(translate(row, read_checkpoint(folder).config, "model"), row) is None
    reason_found = missing_plan(translate(row, whole, "model"), row)
    assert reason_found is not None and reason in reason_found
