"""Parts of the packed forwards that no engine on a CPU shows: layouts as on CUDA, distances, blocks and splits."""

from __future__ import annotations

import random

import pytest
import torch
from tests.dispatched import Dispatched
from tests.parity.test_backbones import TOLERANCE, VISIBLE, difference, expected_of, states
from tests.parity.test_deberta import FORMS
from tests.tiny import FAMILIES, TEXTS, write_checkpoint
from transformers import DebertaV2Config, DebertaV2Model, LlamaConfig, LlamaModel

from millpond import Engine
from millpond.attention.padded_row import PaddedRow
from millpond.attention.segments import Segments
from millpond.checkpoints.architectures import find
from millpond.checkpoints.native_config import translate
from millpond.models import deberta, gte, internlm2, jamba

# --- DeBERTa ----------------------------------------------------------------------------------------------------------

RELATIVE = {"relative_attention": True, "pos_att_type": "p2c|c2p", "position_buckets": 16, "share_att_key": True}


def packed_deberta(**config):
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    return deberta.PackedDeberta(DebertaV2Model(DebertaV2Config(**RELATIVE, **size, vocab_size=50, **config)).eval())


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_deberta_in_blocks_and_as_on_cuda(form, tmp_path, monkeypatch):
    """Small blocks have other windows of distances; on CUDA texts of similar lengths are filled up to one batch."""
    folder = write_checkpoint(tmp_path / "model", "deberta-v2", config=FORMS[form])
    expected, block = expected_of(folder, TEXTS), deberta._SCORE_BLOCK
    with Engine(folder, dtype="float32", device="cpu") as engine:
        for row, size in ((deberta._row, 400), (PaddedRow.of, block), (PaddedRow.of, 400)):
            monkeypatch.setattr(deberta, "_row", row)
            monkeypatch.setattr(deberta, "_SCORE_BLOCK", size)
            assert difference(states(engine, TEXTS), expected) <= TOLERANCE


def test_a_mixed_batch_takes_few_kernel_starts(monkeypatch):
    packed, lengths = packed_deberta(), list(range(5, 65))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    forward = {"input_ids": torch.ones(1, sum(lengths), dtype=torch.long), "position_ids": positions}

    def starts():
        with torch.inference_mode():
            packed(**forward, segments=Segments.of(lengths))
            with Dispatched() as dispatched:
                packed(**forward, segments=Segments.of(lengths))
        return dispatched.number

    by_run = starts()
    monkeypatch.setattr(deberta, "_row", PaddedRow.of)
    assert by_run > 1000
    assert starts() < 150


def test_the_table_of_distances_is_placed_once(monkeypatch):
    """A copy in each forward would wait for the device; it grows with the longest text."""
    monkeypatch.setattr(deberta, "_REACH", 8)
    placed = []
    monkeypatch.setattr(deberta, "on_device", lambda table, device: placed.append(len(table)) or table)
    model = packed_deberta()
    for longest in (3, 8, 1, 9, 16, 10, 5):
        batches = model._batches(Segments.of([longest, 2, 1]), torch.device("cpu"))
        assert {length: rows.tolist() for length, rows in batches.distances.items()} == {
            length: model.distances.rows(length).tolist() for length in {longest, 2, 1}
        }
    assert placed == [15, 31]


@pytest.mark.parametrize("buckets", [16, 256])
@pytest.mark.parametrize("longest", [1, 5, 700])
def test_distances_fall_into_transformers_buckets(buckets, longest):
    from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

    rows = deberta.Distances(span=buckets, buckets=True, farthest=512).rows(longest)
    anything = torch.zeros(1, longest, 1)
    theirs = build_relative_position(anything, anything, bucket_size=buckets, max_position=512)[0]
    distance = torch.arange(longest)[:, None] - torch.arange(longest)[None, :]
    assert torch.equal(rows[distance + longest - 1], (theirs + buckets).clamp(0, 2 * buckets - 1))


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 4), (4, 1), (3, 5)])
def test_skewed_is_a_gather(n, m):
    products = torch.randn(2, 3, n, n + m - 1, generator=torch.Generator().manual_seed(0))
    index = (n - 1 - torch.arange(n))[:, None] + torch.arange(m)
    assert torch.equal(deberta.skewed(products), products.gather(-1, index.expand(2, 3, n, m)))


@pytest.mark.parametrize("row", [lambda *_: None, PaddedRow.of], ids=["runs", "as on CUDA"])
def test_tokens_that_are_not_keys_have_no_effect(row, monkeypatch):
    """A limit on the keys (for the expansion of a late-interaction query) applies as in the shared kernels."""
    monkeypatch.setattr(deberta, "_row", row)
    packed = packed_deberta(norm_rel_ebd="layer_norm", position_biased_input=False)
    ids = torch.arange(1, 15)[None]
    positions = torch.cat([torch.arange(8), torch.arange(6)])[None]
    changed = ids.clone()
    changed[0, 5:8] = 40

    def first(ids, keys):
        segments = Segments.of([8, 6], keys=keys)
        with torch.inference_mode():
            states = packed.layers[0](
                packed.embeddings(ids, position_ids=positions)[0], packed._batches(segments, "cpu")
            )
        return states[:5]

    assert torch.equal(first(ids, [5, 6]), first(changed, [5, 6]))
    assert (first(ids, None) - first(changed, None)).abs().max() > VISIBLE


# --- Jamba ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_jambas_batches_hold_each_token_once_and_little_padding(seed):
    lengths = [random.Random(seed + i).choice([1, 2, 3, 7, 8, 9, 64, 200]) for i in range(20)]
    made = jamba.padded_batches(Segments.of(lengths), torch.device("cpu"))
    assert sorted(torch.cat([block.rows for block in made]).tolist()) == list(range(sum(lengths)))
    assert sum(block.texts for block in made) == len(lengths)
    for block in made:
        assert len(set(block.slots.tolist())) == len(block.rows) == len(block.slots)
        assert block.slots.max() < block.texts * block.longest < 2 * len(block.rows) + 1
        # A text's tokens are in order, from the start of a row of the batch.
        starts = (block.slots % block.longest == 0).nonzero()[:, 0].tolist()
        assert len(starts) == block.texts
        within = (block.slots.diff() == 1) & (block.slots[1:] % block.longest != 0)
        assert (block.rows.diff()[within] == 1).all()


def test_the_indices_of_all_batches_are_one_copy(monkeypatch):
    """To a GPU each copy from the host takes a start, and from pageable memory it waits for the device."""
    copies = []
    monkeypatch.setattr(jamba, "on_device", lambda indices, device: copies.append(len(indices)) or indices)
    lengths = [1, 2, 3, 9, 64, 200]
    assert len(jamba.padded_batches(Segments.of(lengths), torch.device("cpu"))) > 3
    assert copies == [2 * sum(lengths)]


# --- InternLM2, GTE ---------------------------------------------------------------------------------------------------


def test_internlm2s_queries_keys_and_values_by_hand():
    """Four query heads on two key heads, one wide: q0 q1 k0 v0 q2 q3 k1 v1."""
    query, key, value = internlm2.split_qkv(torch.arange(8.0)[:, None], heads=4, kv_heads=2)
    assert (query[:, 0].tolist(), key[:, 0].tolist(), value[:, 0].tolist()) == ([0, 1, 4, 5], [2, 6], [3, 7])


@pytest.mark.parametrize(("theta", "factor", "dim"), [(20000, 8.0, 64), (500000, 2.0, 64), (160000, 2.0, 64)])
def test_gtes_scaling_gives_the_originals_frequencies(theta, factor, dim):
    config = {
        "model_type": "new",
        "hidden_size": 4 * dim,
        "num_attention_heads": 4,
        "rope_theta": theta,
        "rope_scaling": {"type": "ntk", "factor": factor},
    }
    actual = speeds(translate(find(config, "x"), config, "x")["rope_parameters"], dim)
    base = torch.tensor(theta * factor, dtype=torch.float64)
    expected = base ** -(torch.arange(0, dim, 2) / dim) / factor ** (2 / dim)
    assert float(((actual - expected) / expected).abs().max()) < 1e-5
    plain = speeds({"rope_type": "default", "rope_theta": theta * factor}, dim)  # transformers' own default for gte
    assert float(((plain - expected) / expected).abs().min()) > 0.02


def speeds(parameters, dim):
    size = {"num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 8}
    config = LlamaConfig(hidden_size=4 * dim, **size)
    config.rope_parameters = parameters
    return LlamaModel(config).rotary_emb.inv_freq.double()


@pytest.mark.parametrize(
    ("claim", "kind", "theta"),
    [
        ({}, "default", 20000.0),
        ({"rope_scaling": {"type": "ntk", "factor": 1.0}}, "default", 20000.0),
        ({"rope_theta": None}, "default", 10000.0),
        ({"rope_theta": None, "model_type": "gte"}, "default", 160000.0),
        ({"model_type": "gte", "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, "default", 7.0),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}}, "linear", 7.0),
    ],
)
def test_gtes_other_positions(claim, kind, theta):
    found = gte.translate({**FAMILIES["gte"].config, "rope_scaling": None, **claim}, "x")["rope_parameters"]
    assert found == {"rope_type": kind, "rope_theta": theta} | ({"factor": 2.0} if kind == "linear" else {})
