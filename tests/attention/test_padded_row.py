"""Dense batches of texts of similar lengths: what the reference kernel does on CUDA, here on a CPU."""

import random
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.dispatched import Dispatched

from millpond.attention import dense, padded_row, sdpa
from millpond.attention.padded_row import PaddedRow
from millpond.attention.segments import Segments
from millpond.attention.signature import Masking

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


def states(segments, kv_heads=4, dim=16, size=1.0, dtype=torch.float32):
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
    q, k, v = states(segments, kv_heads)
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
    q, k, v = states(segments, dim=dim)
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
    q, k, v = states(segments, size=size, dtype=dtype)
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
    q, k, v = states(segments, **options)
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
    q, k, v = states(segments_of("sorted"))
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
