"""Every packed attention kernel against attention written out naively, one segment at a time."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.pairwise import pairwise

from millpond.backends.torch.attention import (
    dense,
    interface,
    kernels,
    matmul_attention,
    native,
    sdpa,
    segments,
    triton,
    varlen,
)
from millpond.backends.torch.attention.kernels import attend, select
from millpond.backends.torch.attention.segments import Joined, Run, Segments
from millpond.backends.torch.attention.signature import Masking
from millpond.native.library import library

LENGTHS = [7, 1, 13, 13, 30, 4]


def naive(query, key, value, lengths, masking, keys=None):
    """Scores, weights and sums in plain loops over segments and heads; ``[tokens, heads, dim]``."""
    out, start = torch.empty_like(query), 0
    groups = query.shape[1] // key.shape[1]
    for length, usable in zip(lengths, keys or lengths, strict=True):
        for head in range(query.shape[1]):
            q = query[start : start + length, head]
            k, v = (states[start : start + length, head // groups] for states in (key, value))
            scores = (q @ k.T) * masking.scale
            if masking.softcap is not None:
                scores = masking.softcap * torch.tanh(scores / masking.softcap)
            if masking.bias is not None:
                scores = scores + masking.bias[head, :length, :length]
            for i in range(length):
                for j in range(length):
                    outside = masking.window is not None and abs(i - j) >= masking.window
                    if outside or (masking.causal and j > i) or j >= usable:
                        scores[i, j] = float("-inf")
            out[start : start + length, head] = scores.softmax(-1).nan_to_num(nan=0.0) @ v
        start += length
    return out


def states(dtype=torch.float32, kv_heads=4, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    shapes = [(total, 4, 16), (total, kv_heads, 16), (total, kv_heads, 16)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


MASKINGS = {
    "full": Masking(scale=0.25, causal=False),
    "causal": Masking(scale=0.25, causal=True),
    "window": Masking(scale=0.25, causal=False, window=5),
    "causal window": Masking(scale=0.25, causal=True, window=5),
    "softcap": Masking(scale=0.25, causal=True, softcap=0.5),
    "softcap window": Masking(scale=0.25, causal=True, softcap=0.5, window=5),
    "softcap bidirectional": Masking(scale=0.3, causal=False, softcap=0.5),
    "causal bias": Masking(
        scale=0.25, causal=True, window=6, bias=torch.randn(4, 30, 30, generator=torch.Generator().manual_seed(3))
    ),
    "bias": Masking(scale=0.25, causal=False, bias=torch.randn(4, 30, 30, generator=torch.Generator().manual_seed(2))),
}


@pairwise(masking=MASKINGS, kv_heads=[4, 2, 1])
def test_sdpa_equals_naive(masking, kv_heads):
    q, k, v = states(kv_heads=kv_heads)
    out = sdpa.attend(q, k, v, Segments.of(LENGTHS), masking)
    torch.testing.assert_close(out, naive(q, k, v, LENGTHS, masking), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("masking", MASKINGS.values(), ids=MASKINGS.keys())
def test_the_explicit_path_equals_naive_in_blocks(masking, monkeypatch):
    monkeypatch.setattr(dense, "_SCORE_BLOCK", 256)  # several blocks of query rows per run
    monkeypatch.setattr(dense, "is_plain", lambda masking: False)
    q, k, v = states(kv_heads=2)
    out = sdpa.attend(q, k, v, Segments.of(LENGTHS), masking)
    torch.testing.assert_close(out, naive(q, k, v, LENGTHS, masking), atol=2e-6, rtol=1e-5)


# A cost of 0 joins no runs, 70 a few, and 1000 all that have a longer neighbour.
@pairwise(masking=MASKINGS, joined={"none": ("one", 0), "few": ("many", 70), "all": ("one", 1000)}, kv_heads=[4, 2])
def test_products_equal_naive(masking, kv_heads, joined, monkeypatch):
    blocks, start = joined
    monkeypatch.setattr(segments, "_START_COST", start)
    if blocks == "many":  # several blocks of rows, and of texts
        monkeypatch.setattr(matmul_attention, "_BLOCK", 256)
        monkeypatch.setattr(matmul_attention, "_TEXT_BLOCK", 256)
        monkeypatch.setattr(matmul_attention, "_MIN_ROWS", 3)
    monkeypatch.setattr(matmul_attention, "_FEW_SCORES", 0)
    monkeypatch.setattr(matmul_attention, "_FAST_DTYPES", (torch.float32, torch.bfloat16))
    q, k, v = states(kv_heads=kv_heads)
    expected = naive(q, k, v, LENGTHS, masking)
    # The computation does not depend on the precision, and float32 shows every mistake.
    torch.testing.assert_close(
        matmul_attention.attend(q, k, v, Segments.of(LENGTHS), masking), expected, atol=2e-6, rtol=1e-5
    )
    out = matmul_attention.attend(*(part.bfloat16() for part in (q, k, v)), Segments.of(LENGTHS), masking)
    torch.testing.assert_close(out.float(), expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("size", [1.0, 40.0, 400.0])
def test_products_survive_scores_of_any_size(size, monkeypatch):
    """exp2 of the largest would overflow, and of the smallest vanish: then torch's kernel computes the run."""
    monkeypatch.setattr(matmul_attention, "_FEW_SCORES", 0)
    q, k, v = states(torch.bfloat16)
    by_torch = []
    run = dense.attend_run
    monkeypatch.setattr(dense, "attend_run", lambda *arguments: by_torch.append(arguments[4]) or run(*arguments))
    for sign in (size, -size):  # equal signs overflow, opposite ones underflow
        large_q, large_k = q.abs() * size, k.abs() * sign
        masking = Masking(scale=0.25, causal=False)
        out = matmul_attention.attend(large_q, large_k, v, Segments.of(LENGTHS), masking)
        expected = naive(large_q.float(), large_k.float(), v.float(), LENGTHS, masking)
        assert torch.isfinite(out).all()
        if size == 1.0:
            torch.testing.assert_close(out.float(), expected, atol=0.05, rtol=0.05)
    assert bool(by_torch) == (size > 1)


@pytest.mark.parametrize("causal", [True, False])
def test_products_take_narrow_windows_in_float32(causal, monkeypatch):
    lengths = [9, 40, 41, 300]
    q, k, v = states(lengths=lengths)
    masking = Masking(scale=0.25, causal=causal, window=8)
    packed = Segments.of(lengths)
    assert select(q, k, v, packed, masking) is matmul_attention
    assert select(q, k, v, packed, Masking(scale=0.25, causal=causal)) is sdpa
    assert select(q, k, v, packed, Masking(scale=0.25, causal=causal, window=101)) is sdpa  # 300 tokens: not narrow
    by_torch = []
    run = dense.attend_run
    monkeypatch.setattr(dense, "attend_run", lambda *arguments: by_torch.append(arguments[4].length) or run(*arguments))
    out = matmul_attention.attend(q, k, v, Segments.of(lengths), masking)
    assert by_torch == [9]
    torch.testing.assert_close(out, sdpa.attend(q, k, v, Segments.of(lengths), masking), atol=2e-6, rtol=1e-5)


def test_neighbours_of_nearly_equal_length_are_joined():
    one, two, far = Segments.of([30, 31, 33, 200]).parts, Segments.of([40, 40, 41]).parts, Segments.of([5]).parts
    assert [part.length for part in one] == [33, 200]
    assert isinstance(one[0], Joined)
    assert one[0].valid.sum(1).tolist() == [30, 31, 33]
    assert one[0].rows[:33].tolist() == [*range(30), 29, 29, 29]
    assert one[0].rows[-33:].tolist() == [*range(61, 94)]
    assert [part.count for part in two] == [3]
    assert far == Segments.of([5]).runs
    for keys in ([3, 31], [30, 3]):
        limited = Segments.of([30, 31], keys=keys)
        assert limited.parts == limited.runs


def test_tiny_runs_are_left_to_torchs_kernel(monkeypatch):
    by_products = []
    monkeypatch.setattr(
        matmul_attention, "_attend_batch", lambda out, *rest, **options: by_products.append(out.shape[3]) or True
    )
    q, k, v = states(torch.bfloat16, lengths=[100, 4, 4, 4, 4, 4, 4, 4])
    matmul_attention.attend(q, k, v, Segments.of([100, *[4] * 7]), Masking(scale=0.25, causal=False))
    assert by_products == [100, 4]  # one of a hundred tokens, and seven texts of four: 28 heads


# A query of three real tokens with expansion, sequences whose tokens all are keys, neighbours that differ in keys only.
KEYS = [3, 1, 13, 5, 30, 1]
KEY_LENGTHS = [7, 1, 13, 13, 30, 4]


@pairwise(masking=MASKINGS, kv_heads=[4, 2], short={"fused": False, "explicit": True})
def test_fewer_keys_than_queries(masking, kv_heads, short, monkeypatch):
    if short:
        monkeypatch.setattr(dense, "is_plain", lambda masking: False)
    monkeypatch.setattr(dense, "_SCORE_BLOCK", 256)
    q, k, v = states(kv_heads=kv_heads, lengths=KEY_LENGTHS)
    out = sdpa.attend(q, k, v, Segments.of(KEY_LENGTHS, keys=KEYS), masking)
    monkeypatch.setattr(matmul_attention, "_FAST_DTYPES", (torch.float32,))
    torch.testing.assert_close(
        matmul_attention.attend(q, k, v, Segments.of(KEY_LENGTHS, keys=KEYS), masking), out, atol=2e-6, rtol=1e-5
    )
    expected = naive(q, k, v, KEY_LENGTHS, masking, KEYS)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


def test_tokens_that_are_no_keys_do_not_matter():
    q, k, v = states(lengths=KEY_LENGTHS)
    segments = Segments.of(KEY_LENGTHS, keys=KEYS)
    out = sdpa.attend(q, k, v, segments, MASKINGS["full"])
    for states_ in (k, v):
        states_[3:7] = float("nan")
    torch.testing.assert_close(sdpa.attend(q, k, v, segments, MASKINGS["full"])[:7], out[:7], atol=0, rtol=0)


def cuda_query(dtype=torch.bfloat16, dim=16):
    """What kernels read of a query to decide, of one on CUDA, which this machine may not have."""
    shape = torch.Size((sum(KEY_LENGTHS), 4, dim))
    return SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=shape, stride=lambda axis: 1)


def on_cuda(masking, packed, **query):
    """The kernel that serves a call on CUDA."""
    return select(cuda_query(**query), *states(torch.bfloat16, lengths=KEY_LENGTHS)[1:], packed, masking)


PACKED = Segments.of(KEY_LENGTHS)


LIMITED = Segments.of(KEY_LENGTHS, keys=KEYS)
SHARED = Segments.of(KEY_LENGTHS, prefixes=[-1, 0, 0, -1, 0, 0])
RECENT = ("scale", "window_size", "enable_gqa", "seqused_k")  # every parameter that varlen uses


@pytest.mark.parametrize(
    ("kernel", "masking", "packed", "query", "parameters"),
    [
        *((varlen, "full", PACKED, {"dtype": dtype}, RECENT) for dtype in (torch.float16, torch.bfloat16)),
        *((sdpa, "softcap", PACKED, {"dtype": dtype}, RECENT) for dtype in (torch.float16, torch.float32)),
        (sdpa, "full", PACKED, {"dtype": torch.float32}, RECENT),
        *((sdpa, "full", PACKED, {"dim": dim}, RECENT) for dim in (20, 264)),
        (sdpa, "bias", PACKED, {}, RECENT),
        (sdpa, "softcap bias", PACKED, {}, RECENT),
        # It would align limited keys to the last one under causality and windows; the reference serves such a call.
        *((varlen, name, PACKED, {}, RECENT) for name in ("causal", "window", "causal window")),
        *((sdpa, name, LIMITED, {}, RECENT) for name in ("causal", "window", "causal window")),
        (varlen, "full", LIMITED, {}, RECENT),
        (varlen, "wide window", LIMITED, {}, RECENT),
        (sdpa, "full", LIMITED, {}, ("scale", "window_size")),
        (varlen, "full", PACKED, {}, ("scale", "window_size")),
        (sdpa, "full", PACKED, {}, ("scale", "is_causal")),
        *((sdpa, name, SHARED, {}, RECENT) for name in ("full", "causal", "softcap")),
    ],
)
def test_which_kernel_serves_a_call_on_cuda(kernel, masking, packed, query, parameters, monkeypatch):
    monkeypatch.setattr(varlen, "parameters", lambda: frozenset(parameters))
    more = {
        "softcap bias": replace(MASKINGS["softcap"], bias=MASKINGS["bias"].bias),
        "wide window": Masking(scale=0.25, causal=False, window=30),  # spans the longest text
    }
    assert on_cuda((MASKINGS | more)[masking], packed, **query) is kernel


def test_triton_serves_what_it_computes_where_it_is(monkeypatch):
    monkeypatch.setattr(triton, "unavailable", lambda: None)
    for packed in (PACKED, LIMITED):
        for masking in MASKINGS.values():
            assert on_cuda(masking, packed) is triton
            assert on_cuda(masking, packed, dtype=torch.float32) is not triton
    assert on_cuda(MASKINGS["causal"], SHARED) is not triton


def test_which_kernel_serves_a_call_on_a_cpu():
    for masking in MASKINGS.values():
        narrow = masking.window is not None
        # The compiled kernel reads a bias in bfloat16 only.
        half = native if library() is not None and masking.bias is None else matmul_attention
        serving = {torch.float32: matmul_attention if narrow else sdpa, torch.bfloat16: half, torch.float16: sdpa}
        for dtype, kernel in serving.items():
            assert select(*states(dtype), Segments.of(LENGTHS), masking) is kernel


def test_the_log_names_the_kernel_once_for_each_kind_of_call(caplog):
    kernels._log_kind.cache_clear()
    q, k, v = states(kv_heads=2)
    with caplog.at_level(logging.INFO, logger="millpond"):
        attend(q, k, v, Segments.of(LENGTHS), MASKINGS["full"])
    assert not caplog.records
    with caplog.at_level(logging.DEBUG, logger="millpond"):
        for lengths in (LENGTHS, LENGTHS[::-1]):
            attend(q, k, v, Segments.of(lengths), MASKINGS["full"])
        attend(q, k, v, Segments.of(LENGTHS), MASKINGS["softcap window"])
    assert caplog.messages == [
        "attention kernel sdpa: float32 on cpu, 4 heads of 16 (2 for keys)",
        "attention kernel matmul: float32 on cpu, 4 heads of 16 (2 for keys), causal, window 5, softcap 0.5",
    ]


def test_runs_group_neighbours_of_the_same_length_and_keys():
    segments = Segments.of([3, 3, 2, 3])
    assert segments.runs == (
        Run(start=0, count=2, length=3),
        Run(start=6, count=1, length=2),
        Run(start=8, count=1, length=3),
    )
    assert segments.total == 11 and segments.max_seqlen == 3
    assert segments.cu_seqlens.tolist() == [0, 3, 6, 8, 11] and segments.cu_seqlens.dtype == torch.int32
    segments = Segments.of([3, 3, 3, 2], keys=[2, 2, 3, 2])
    assert segments.runs == (
        Run(start=0, count=2, length=3, keys=2),
        Run(start=6, count=1, length=3),
        Run(start=9, count=1, length=2),
    )
    assert segments.keys == (2, 2, 3, 2)
    assert segments.seqused_k.tolist() == [2, 2, 3, 2] and segments.seqused_k.dtype == torch.int32
    unlimited = Segments.of([3, 3, 2], keys=[3, 3, 2])
    assert unlimited.keys is None and unlimited.seqused_k is None and unlimited.runs == Segments.of([3, 3, 2]).runs


@pytest.mark.parametrize(
    ("lengths", "keys", "match"),
    [([3, 2], keys, "at least one and at most all") for keys in ([0, 2], [3, 3], [3], [4, 2])]
    + [(lengths, None, "at least one token") for lengths in ([], [3, 0, 2])],
)
def test_impossible_lengths_and_keys_are_refused(lengths, keys, match):
    with pytest.raises(ValueError, match=match):
        Segments.of(lengths, keys=keys)


def test_the_interface_refuses_a_padded_batch():
    q = torch.zeros(1, 4, 3, 16)
    with pytest.raises(RuntimeError, match="packed row"):
        interface.packed_attention(torch.nn.Identity(), q, q, q, None)
    mask = torch.ones(1, 3)
    with pytest.raises(RuntimeError, match="packed row"):
        interface.packed_attention(torch.nn.Identity(), q, q, q, mask, segments=Segments.of([3]))


def test_is_causal_as_an_argument_wins_over_the_module():
    module = torch.nn.Identity()
    module.is_causal = True
    q, k, v = (x.transpose(0, 1)[None] for x in states())
    out, _ = interface.packed_attention(
        module, q, k, v, None, scaling=0.25, is_causal=False, segments=Segments.of(LENGTHS)
    )
    expected = naive(*states(), LENGTHS, MASKINGS["full"])
    torch.testing.assert_close(out[0], expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 3, 7, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_over_a_shared_prefix(softcap, window):
    generator = torch.Generator().manual_seed(1)
    masking = Masking(scale=0.5, causal=True, window=window, softcap=softcap)
    prefix, own = 6, (1, 4, 4, 9)
    states = [torch.randn(prefix + sum(own), heads, 8, generator=generator) for heads in (4, 2, 2)]
    segments = Segments.of((prefix, *own), prefixes=(-1, 0, 0, 0, 0))
    out = sdpa.attend(*states, segments, masking)
    start = prefix
    for length in own:
        rows = [torch.cat((part[:prefix], part[start : start + length])) for part in states]
        alone = sdpa.attend(*rows, Segments.of((prefix + length,)), masking)
        torch.testing.assert_close(out[start : start + length], alone[prefix:], atol=1e-5, rtol=1e-5)
        start += length
