"""Forwards of single families and the padded row that they run on, beside formulas and transformers' own."""

from __future__ import annotations

import json
import random
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.dispatched import Dispatched
from tests.parity.test_backbones import TOLERANCE, VISIBLE, difference, expected_of, states
from tests.parity.test_deberta import FORMS
from tests.tiny import FAMILIES, TEXTS, write_checkpoint
from transformers import DebertaV2Config, DebertaV2Model, LlamaConfig, LlamaModel

from millpond import Engine
from millpond.backends.torch.attention import dense, padded_row, sdpa
from millpond.backends.torch.attention.padded_row import PaddedRow
from millpond.backends.torch.attention.segments import Segments
from millpond.backends.torch.attention.signature import Masking
from millpond.backends.torch.forwards import deberta, recurrent
from millpond.backends.torch.weights import read_tensors
from millpond.checkpoints.architectures import find
from millpond.checkpoints.families import gte as gte_family
from millpond.checkpoints.families import internlm2
from millpond.checkpoints.families.native import rename, translate
from millpond.checkpoints.weights import stored_tensors
from millpond.errors import WeightMismatchError

# --- Parts of the packed forwards that no engine on a CPU shows: layouts as on CUDA, distances, blocks and splits -----


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
        batches = model._batches.of(Segments.of([longest, 2, 1]), torch.device("cpu"))
        assert {length: rows.tolist() for length, rows in batches.distances.items()} == {
            length: model._batches._rows(length).tolist() for length in {longest, 2, 1}
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
                packed.embeddings(ids, position_ids=positions)[0], packed._batches.of(segments, "cpu")
            )
        return states[:5]

    assert torch.equal(first(ids, [5, 6]), first(changed, [5, 6]))
    assert (first(ids, None) - first(changed, None)).abs().max() > VISIBLE


# --- Recurrent layers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_padded_batches_hold_each_token_once_and_little_padding(seed):
    lengths = [random.Random(seed + i).choice([1, 2, 3, 7, 8, 9, 64, 200]) for i in range(20)]
    made = recurrent.padded_batches(Segments.of(lengths), torch.device("cpu"))
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
    monkeypatch.setattr(recurrent, "on_device", lambda indices, device: copies.append(len(indices)) or indices)
    lengths = [1, 2, 3, 9, 64, 200]
    assert len(recurrent.padded_batches(Segments.of(lengths), torch.device("cpu"))) > 3
    assert copies == [2 * sum(lengths)]


# --- InternLM2, GTE ---------------------------------------------------------------------------------------------------


def test_internlm2s_queries_keys_and_values_by_hand():
    """Four query heads on two key heads, one wide: q0 q1 k0 v0 q2 q3 k1 v1."""
    assert internlm2.qkv_rows(8, heads=4, kv_heads=2) == ([0, 1, 4, 5], [2, 6], [3, 7])
    assert internlm2.qkv_rows(8, heads=2, kv_heads=1) == ([0, 1, 2, 3], [4, 5], [6, 7])  # two wide
    with pytest.raises(WeightMismatchError, match="9 rows, which 4 heads and 2 key heads do not share"):
        internlm2.qkv_rows(9, heads=4, kv_heads=2)


@pytest.mark.parametrize("family", ["nomic", "gte", "jina", "internlm2"])
def test_stored_tensors_are_renamed_as_torch_s(family, tmp_path):
    folder = write_checkpoint(tmp_path / "model", family)
    config = json.loads((folder / "config.json").read_text())
    row = find(config, family)
    native = translate(row, config, family)
    expected = rename(row, read_tensors(folder), native)
    renamed = rename(row, stored_tensors(folder), native)
    assert renamed.keys() == expected.keys() != stored_tensors(folder).keys()
    for name, tensor in expected.items():
        assert renamed[name].shape == tuple(tensor.shape)
        np.testing.assert_array_equal(renamed[name].float32(), tensor.float().numpy())


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
    found = gte_family.translate({**FAMILIES["gte"].config, "rope_scaling": None, **claim}, "x")["rope_parameters"]
    assert found == {"rope_type": kind, "rope_theta": theta} | ({"factor": 2.0} if kind == "linear" else {})


# --- Dense batches of texts of similar lengths: what the reference kernel does on CUDA, here on a CPU -----------------


CPU = torch.device("cpu")
MIXED = random.Random(3).sample(range(10, 500), 90)

# Lengths, keys, and prefixes.
LAYOUTS = {
    "one token": ([1], None, None),
    "one text": ([9], None, None),
    "equal": ([12] * 5, None, None),
    "sorted": ([1, 2, 3, 3, 7, 8, 30, 31], None, None),
    "unsorted": ([30, 1, 8, 31, 2, 90, 3, 7, 3], None, None),
    "queries": ([32] * 6, [5, 32, 1, 7, 7, 20], None),
    "queries and documents": ([8, 40, 8, 13, 8], [3, 40, 8, 13, 1], None),
    "a prefix": ([6, 4, 4, 9, 1], None, [-1, 0, 0, 0, 0]),
    "two prefixes": ([6, 20, 4, 5, 4, 9, 7], None, [-1, -1, 0, 0, 1, 1, -1]),
}
BIAS = torch.randn(4, 90, 90, generator=torch.Generator().manual_seed(2))
MASKINGS = {
    "full": Masking(scale=0.25, causal=False),
    "causal": Masking(scale=0.25, causal=True),
    "window": Masking(scale=0.25, causal=False, window=5),
    "window of one": Masking(scale=0.25, causal=False, window=1),
    "causal window": Masking(scale=0.25, causal=True, window=5),
    "causal softcap": Masking(scale=0.25, causal=True, softcap=0.5),
    "softcap": Masking(scale=0.25, causal=False, softcap=0.5),
    "bias": Masking(scale=0.25, causal=False, bias=BIAS),
    "causal bias": Masking(scale=0.25, causal=True, window=6, bias=BIAS),
}


def segments_of(name):
    lengths, keys, prefixes = LAYOUTS[name]
    return Segments.of(lengths, keys=keys, prefixes=prefixes)


def drawn(segments, kv_heads=4, dim=16, size=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = [(segments.total, count, dim) for count in (4, kv_heads, kv_heads)]
    return [(size * torch.randn(shape, generator=generator)).to(dtype) for shape in shapes]


# All that the kernel pads; no model has a bias and prefixes.
PADDED = [
    (layout, masking)
    for layout, masking in product(LAYOUTS, MASKINGS)
    if sdpa.can_pad(segments_of(layout), MASKINGS[masking]) and not ("prefix" in layout and "bias" in masking)
]


@pytest.mark.parametrize(("layout", "masking", "kv_heads"), [(*row, 4 >> i % 2) for i, row in enumerate(PADDED)])
def test_batches_equal_the_reference(layout, masking, kv_heads, monkeypatch):
    segments, masking = segments_of(layout), MASKINGS[masking]
    q, k, v = drawn(segments, kv_heads)
    expected = sdpa.attend(q, k, v, segments, masking)
    torch.testing.assert_close(sdpa.attend_padded(q, k, v, segments, masking), expected, atol=2e-6, rtol=1e-5)
    monkeypatch.setattr(padded_row, "_SCORES", 0)  # more batches of fewer texts
    monkeypatch.setattr(padded_row, "_TOKENS", 0)
    again = segments_of(layout)
    torch.testing.assert_close(sdpa.attend_padded(q, k, v, again, masking), expected, atol=2e-6, rtol=1e-5)


def test_what_cannot_be_padded():
    assert not sdpa.can_pad(segments_of("sorted"), MASKINGS["softcap"])  # the cap would lift what is hidden
    assert sdpa.can_pad(segments_of("sorted"), MASKINGS["causal softcap"])
    assert not sdpa.can_pad(segments_of("queries"), MASKINGS["causal softcap"])
    assert not sdpa.can_pad(segments_of("queries"), MASKINGS["window"])  # rows without keys give zeros
    assert sdpa.can_pad(segments_of("queries"), Masking(scale=1.0, causal=False, window=32))
    assert sdpa.can_pad(segments_of("queries and documents"), Masking(scale=1.0, causal=False, window=8))


@pytest.mark.parametrize(
    ("dim", "name"), [(1, "full"), (8, "causal"), (20, "full"), (26, "causal"), (33, "full"), (264, "causal")]
)
def test_any_width_of_heads_reaches_torch_as_a_multiple_of_8(name, dim, monkeypatch):
    segments = segments_of("unsorted")
    q, k, v = drawn(segments, dim=dim)
    expected = sdpa.attend(q, k, v, segments, MASKINGS[name])
    widths = []
    right = dense.F.scaled_dot_product_attention

    def seen(query, key, value, **options):
        widths.append((query.shape[3], key.shape[3], value.shape[3]))
        assert options["scale"] == 0.25
        return right(query, key, value, **options)

    monkeypatch.setattr(dense.F, "scaled_dot_product_attention", seen)
    out = sdpa.attend_padded(q, k, v, segments, MASKINGS[name])
    assert out.shape == q.shape
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=1e-4)
    assert widths and all(width % 8 == 0 for widths_ in widths for width in widths_)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 12.0])
def test_hidden_tokens_stay_hidden_in_every_precision(dtype, size):
    """Also where scores reach hundreds."""
    segments = segments_of("queries and documents")
    q, k, v = drawn(segments, size=size, dtype=dtype)
    changed = [part.clone() for part in (k, v)]
    for i, (length, keys) in enumerate(zip(segments.lengths, segments.keys, strict=True)):
        start = int(segments.cu_seqlens[i])
        for part in changed:
            part[start + keys : start + length] = size
    out = sdpa.attend_padded(q, k, v, segments, MASKINGS["full"])
    assert torch.equal(out, sdpa.attend_padded(q, *changed, segments, MASKINGS["full"]))
    close = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}[dtype]
    torch.testing.assert_close(out, sdpa.attend(q, k, v, segments, MASKINGS["full"]), atol=close * size, rtol=close)


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_token_has_a_place_and_prefixes_move_along(name):
    segments = segments_of(name)
    row = PaddedRow.of(segments, CPU)
    assert row is PaddedRow.of(segments, CPU)  # once for all layers
    assert torch.equal(row.rows[row.places], torch.arange(segments.total))
    starts = segments.cu_seqlens.tolist()
    batches = 0
    for run in row.runs:
        assert run.start == batches and run.keys is None
        batches = run.stop
        texts = row.rows[run.start : run.stop].view(run.count, run.length)
        for text in texts:
            i = starts.index(int(text[0]))
            length = segments.lengths[i]
            assert text.tolist() == [starts[i] + min(j, length - 1) for j in range(run.length)]
            leader = -1 if segments.continued is None else segments.continued[i]
            assert (run.prefix is None) == (leader < 0)
            if run.prefix is not None:
                assert row.rows[slice(*run.prefix)].tolist() == list(range(starts[leader], starts[leader + 1]))
    assert batches == len(row.rows) == len(row.hidden)
    keys = segments.keys or segments.lengths
    assert int((~row.hidden).sum()) == sum(keys)


@pytest.mark.parametrize(
    "lengths",
    [MIXED, [1] * 4000 + [500], [1] * 8000 + [5], [5000, 2000, 9, 4500], list(range(1, 600)), [16_000, 1] * 2],
)
def test_batches_are_few_and_waste_little(lengths):
    row = PaddedRow.of(Segments.of(lengths), CPU)
    needed = sum(lengths)
    scores = sum(length**2 for length in lengths)
    assert len(row.runs) <= 10
    assert len(row.rows) <= 1.5 * needed + 4096 * len(row.runs)
    assert sum(run.count * run.length**2 for run in row.runs) <= 1.5 * scores + len(row.runs) * (1 << 20)


def launches(attend, segments, masking, **options):
    q, k, v = drawn(segments, **options)
    attend(q, k, v, segments, masking)  # what a forward makes once
    with Dispatched() as dispatched:
        attend(q, k, v, segments, masking)
    return dispatched.number


@pytest.mark.contract
@pytest.mark.parametrize("name", ["full", "causal", "bias"])
def test_a_mixed_batch_takes_tens_of_kernel_starts(name):
    """90 lengths: as many calls run by run, with a layer's copies and masks beside them."""
    masking = MASKINGS[name]
    if masking.bias is not None:
        masking = Masking(scale=0.25, causal=False, bias=torch.zeros(4, 500, 500))
    padded = launches(sdpa.attend_padded, Segments.of(MIXED), masking)
    run_by_run = launches(sdpa.attend, Segments.of(MIXED), masking)
    assert padded <= 40
    assert run_by_run >= 4 * padded


def test_on_cuda_the_reference_pads_where_it_can(monkeypatch):
    monkeypatch.setattr(sdpa, "attend_padded", lambda *call: "padded")
    there = SimpleNamespace(device=torch.device("cuda"))
    assert sdpa.attend(there, None, None, segments_of("sorted"), MASKINGS["full"]) == "padded"
    by_run = []
    monkeypatch.setattr(sdpa, "attend_run", lambda *call: by_run.append(call))
    there.new_empty, there.shape = torch.empty, (84, 4, 16)
    sdpa.attend(there, None, None, segments_of("sorted"), MASKINGS["softcap"])
    assert len(by_run) == 7
    q, k, v = drawn(segments_of("sorted"))
    sdpa.attend(q, k, v, segments_of("sorted"), MASKINGS["full"])
    assert len(by_run) == 14  # on a CPU run by run


def test_grouped_heads_on_cuda_need_no_kernel_of_their_own(monkeypatch):
    """torch has none in float32, nor with a mask: it would write out all scores."""
    seen = []

    def attention(query, key, value, **options):
        seen.append((key.shape[1], options["enable_gqa"]))
        return query

    monkeypatch.setattr(dense.F, "scaled_dot_product_attention", attention)

    class Cuda(torch.Tensor):
        """A tensor that says that it is on a GPU."""

        device = torch.device("cuda")

    q, k = torch.zeros(1, 4, 3, 8), torch.arange(2.0)[None, :, None, None].expand(1, 2, 3, 8)
    dense._fused(q.as_subclass(Cuda), k, k, MASKINGS["causal"], 0)
    dense._fused(q, k, k, MASKINGS["causal"], 0)
    assert seen == [(4, False), (2, True)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 7, 8])
def test_a_mask_takes_two_bytes_for_each_pair(causal, window):
    masking = Masking(scale=1.0, causal=causal, window=window)
    mask = masking.mask(7, CPU, keep_causal=True)
    distance = np.arange(7)[:, None] - np.arange(7)[None, :]
    expected = np.ones((7, 7), dtype=bool)
    if causal:
        expected &= distance >= 0
    if window is not None:
        expected &= np.abs(distance) < window
    if not causal and (window is None or window >= 7):
        assert mask is None
    else:
        assert np.array_equal(mask.numpy(), expected)
    with Dispatched() as dispatched:
        Masking(scale=1.0, causal=causal, window=100).mask(2000, CPU)
    assert dispatched.largest <= 2 * 2000**2
