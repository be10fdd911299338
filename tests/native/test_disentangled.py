"""DeBERTa's attention in the native encoder: its formula, and each form of checkpoint beside transformers' class."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.native.models import (
    PRECISIONS,
    ROUNDING,
    TARGETS,
    TOLERANCE,
    VISIBLE,
    apart,
    assert_near,
    assert_same_direction,
    copied,
    encoder_of,
    every_isa,
    given,
    identity,
    numbers,
    plain,
    plan_of,
    tokens,
)
from tests.pairwise import pairwise
from tests.tiny import write_checkpoint

from millpond.models.native.distances import DistanceColumns, Distances, DistanceTerms
from millpond.models.native.encoder import bounds_of
from millpond.models.native.weight_packer import NotSupported

pytestmark = pytest.mark.contract

# Around a vector, a group of rows, a block of them, and what threads divide a text by.
LENGTHS = (1, 2, 5, 8, 17, 31, 32, 33, 63, 95, 96, 97, 130, 193, 600)
DISTANCES = {
    "v3": Distances(span=256, buckets=True, farthest=512),
    "few": Distances(span=8, buckets=True, farthest=100),
    "steep": Distances(span=64, buckets=True, farthest=50),  # far distances have buckets that no distance has
    "none": Distances(span=20, buckets=False, farthest=20),
}


@every_isa
@pairwise(shape={"2x32": (2, 32), "2x64": (2, 64), "1x96": (1, 96)}, used=["both", "keys", "queries"], distances=DISTANCES)
def test_the_terms_of_distances_are_those_of_the_formula(isa, shape, used, distances):
    (heads, dim), dtype, count = shape, PRECISIONS[isa], sum(LENGTHS)
    rows = numbers((count, 3 * heads * dim), dtype)
    keys, queries = (numbers((2 * distances.span, heads * dim), dtype, seed) for seed in (1, 2))
    terms = DistanceTerms(
        columns=DistanceColumns.of(distances),
        keys=None if used == "queries" else keys.numpy(),
        queries=None if used == "keys" else queries.numpy(),
    )
    scale = (3 * dim) ** -0.5
    encoder = encoder_of(
        isa,
        given(rows),
        lambda b: b.heads(identity(3 * heads * dim)),
        lambda b: b.attention(heads=heads, kv_heads=heads, dim=dim, scale=scale, terms=terms, last=True),
        lambda b: b.o_proj(identity(heads * dim)),
        lambda b: b.norm(copied(), heads * dim),
    )
    bounds, ids = bounds_of(LENGTHS), tokens(count)
    for limits in (None, np.array([length - length // 3 for length in LENGTHS], dtype=np.int32)):
        found = encoder.encode(ids, bounds, keys=limits)[:, : heads * dim].double()
        several = encoder.encode(ids, bounds, keys=limits, threads=3)[:, : heads * dim].double()
        assert torch.equal(found, several)
        for i, text in enumerate(rows.double().split(LENGTHS)):
            expected, size = attended(
                text.unflatten(1, (3, heads, dim)),
                *(None if table is None else torch.from_numpy(table).double() for table in (terms.keys, terms.queries)),
                distances,
                scale,
                len(text) if limits is None else int(limits[i]),
            )
            slack = 3e-5 if dtype is torch.float32 else 3 * ROUNDING[dtype]
            assert_near(found[bounds[i] : bounds[i + 1]], expected, slack * size + ROUNDING[dtype] * expected.abs())


def attended(parts, keys, queries, distances, scale, count):
    """The formula, each distance by itself: the result, and that of the values' magnitudes."""
    query, key, value = parts.unbind(1)
    place = np.arange(len(query))
    rows = torch.from_numpy(distances.rows(place[:, None] - place))  # [queries, keys]
    scores = torch.einsum("qhd,khd->hqk", query, key)
    if keys is not None:
        scores += torch.einsum("qhd,qkhd->hqk", query, keys.unflatten(1, key.shape[1:])[rows])
    if queries is not None:
        scores += torch.einsum("khd,qkhd->hqk", key, queries.unflatten(1, key.shape[1:])[rows])
    scores *= scale
    scores[:, :, count:] = -math.inf
    weights = scores.softmax(-1)
    return tuple(torch.einsum("hqk,khd->qhd", weights, part).flatten(1) for part in (value, value.abs()))


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

SIZE = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 192, "max_position_embeddings": 600}
FORMS: dict[str, dict[str, Any]] = {
    "v3": {"position_buckets": 256, "max_position_embeddings": 512},
    "few buckets": {},
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


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    root = tmp_path_factory.mktemp("deberta")
    return cache(lambda form: write_checkpoint(root / form.replace(" ", "-"), "deberta-v2", config=SIZE | FORMS[form]))


def ids() -> torch.Tensor:
    return torch.randint(5, 60, (sum(TEXT_LENGTHS),), generator=torch.Generator().manual_seed(4))


@cache
def expected(folder: Path) -> torch.Tensor:
    """The states of transformers' class, text by text."""
    from transformers import DebertaV2Model

    model = DebertaV2Model.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return torch.cat([model(input_ids=text[None]).last_hidden_state[0] for text in ids().split(TEXT_LENGTHS)])


@pytest.mark.parametrize(("highest", "dtype"), TARGETS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_equals_transformers_class(form, highest, dtype, folder_of):
    encoder = plan_of(plain(folder_of(form), dtype), highest, dtype)
    found = encoder.encode(ids().int().numpy(), bounds_of(TEXT_LENGTHS))
    if dtype is torch.bfloat16:
        assert_same_direction(found, expected(folder_of(form)))
        return
    assert apart(found, expected(folder_of(form))) <= TOLERANCE
    if form != "few buckets":  # each field changes the states, or its row could not fail
        other = expected(folder_of("few buckets"))
        assert apart(found, other) > VISIBLE


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"conv_kernel_size": 3, "conv_act": "gelu"}, "convolution"),
        ({"hidden_act": "tanh"}, "tanh"),
        ({"hidden_size": 80}, "80 columns"),
    ],
)
def test_what_has_no_plan_says_why(config, reason, tmp_path):
    folder = write_checkpoint(tmp_path / "model", "deberta-v2", config=SIZE | config)
    with pytest.raises(NotSupported, match=reason):
        plan_of(plain(folder))
