"""The compiled kernels against float32 references over the same numbers, one kernel after the other."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from tests.pairwise import pairwise
from tests.tiles import emulated_table, emulates

from millpond.backends.torch.attention import matmul_attention, native, sdpa
from millpond.backends.torch.attention.kernels import attend, select
from millpond.backends.torch.attention.segments import Segments
from millpond.backends.torch.attention.signature import Masking
from millpond.backends.torch.forwards.add_norm import AddNorm
from millpond.backends.torch.forwards.rms_norm import RMSNorm
from millpond.backends.torch.forwards.rotary import apply_rotary
from millpond.native import library as place
from millpond.native.library import library

built = pytest.mark.skipif(library() is None, reason="no compiled kernel: no C++ compiler, or no AVX512-BF16")
# Weights and values are rounded to bfloat16, each by at most 2^-9, and the sum is rounded once more.
TOLERANCE = {"atol": 0.02, "rtol": 0.01}
LENGTHS = [[7], [1, 1, 2], [15, 16, 17, 31, 32, 33], [5, 6, 6, 7, 12, 13, 64, 65], [1030, 3, 511, 512, 513]]
SHAPES = [(4, 4, 32), (4, 2, 16), (3, 1, 48), (2, 2, 64), (2, 1, 80), (2, 1, 96), (4, 2, 128), (1, 1, 256)]


@pytest.fixture(scope="module")
def tile_table(tmp_path_factory):
    return emulated_table(tmp_path_factory.mktemp("tiles"))


@pytest.fixture(params=["pairs", pytest.param("tiles", marks=emulates)])
def kernel(request, monkeypatch):
    """Attention by pairs of bfloat16, or in tiles, which are emulated."""
    table = None if request.param == "pairs" else request.getfixturevalue("tile_table")
    monkeypatch.setattr(place, "kernel_table", lambda highest=None: table)


by_each_kernel = pytest.mark.usefixtures("kernel")


def states(lengths, heads, kv_heads, dim, *, size=1.0):
    """Query, key and value as views of one tensor, as a fused projection gives them."""
    generator = torch.Generator().manual_seed(sum(lengths) + dim)
    fused = size * torch.randn(sum(lengths), heads + 2 * kv_heads, dim, generator=generator)
    query, key, value = fused.bfloat16().split([heads, kv_heads, kv_heads], 1)
    return query, key, value / size


@contextmanager
def torch_threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def reference(query, key, value, segments, masking):
    if masking.bias is not None:
        masking = replace(masking, bias=masking.bias.float())
    return sdpa.attend(query.float(), key.float(), value.float(), segments, masking)


def assert_equal(qkv, segments, masking):
    out = native.attend(*qkv, segments, masking)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.float(), reference(*qkv, segments, masking), **TOLERANCE)


@built
@by_each_kernel
@pairwise(shape=SHAPES, lengths=LENGTHS, causal=[False, True])
def test_it_equals_the_reference(lengths, shape, causal):
    qkv = states(lengths, *shape)
    assert_equal(qkv, Segments.of(lengths), Masking(scale=shape[2] ** -0.5, causal=causal))


@built
@by_each_kernel
@pairwise(window=[1, 2, 9, 16, 17, 65, 600], lengths=LENGTHS[2:], causal=[False, True], softcap=[None, 0.5, 30.0])
def test_windows_and_softcaps(lengths, window, causal, softcap):
    qkv = states(lengths, 4, 2, 32, size=1.0 if softcap is None else 4.0)
    assert_equal(qkv, Segments.of(lengths), Masking(scale=0.2, causal=causal, window=window, softcap=softcap))


@built
@by_each_kernel
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_a_bias(lengths):
    qkv, segments = states(lengths, 4, 4, 32), Segments.of(lengths)
    bias = torch.randn(4, max(lengths), max(lengths), generator=torch.Generator().manual_seed(5)).bfloat16()
    for one in (bias, bias.permute(1, 2, 0).permute(2, 0, 1)):  # MPNet's is a view whose rows are not contiguous
        assert_equal(qkv, segments, Masking(scale=0.2, causal=False, bias=one))


FEW = {"lengths": [32, 40, 7, 33], "keys": [5, 40, 1, 17]}
CONTINUED = {"lengths": [19, 5, 40, 1, 16], "prefixes": [-1, 0, 0, -1, 0]}
# The second has as many keys, prefix included, as rows; the window ends before the last rows of the third.
FEW_CONTINUED = {"lengths": [3, 8, 8], "keys": [3, 5, 2], "prefixes": [-1, 0, 0]}


@built
@by_each_kernel
@pytest.mark.parametrize(
    ("texts", "masking"),
    [
        (FEW, {"causal": False}),
        (FEW, {"causal": False, "window": 4}),  # behind the keys are rows without any: zeros
        (CONTINUED, {"causal": False}),
        (CONTINUED, {"causal": True}),
        (FEW_CONTINUED, {"causal": True}),
        (FEW_CONTINUED, {"causal": True, "softcap": 5.0, "window": 3}),
    ],
)
def test_fewer_keys_than_queries_and_sequences_that_continue_another(texts, masking):
    qkv, segments, masking = states(texts["lengths"], 4, 2, 32), Segments.of(**texts), Masking(scale=0.2, **masking)
    assert_equal(qkv, segments, masking)
    if texts is FEW:
        qkv[2].data[5:32] = float("nan")  # not a key, so never read
        assert not native.attend(*qkv, segments, masking).isnan().any()


@built
@by_each_kernel
@pytest.mark.parametrize("size", [1.0, 8.0, 60.0, 1e4])
def test_scores_of_any_size(size):
    lengths = [50, 3, 200]
    assert_equal(states(lengths, 4, 4, 32, size=size), Segments.of(lengths), Masking(scale=32**-0.5, causal=False))


@built
@by_each_kernel
def test_strides_of_all_kinds():
    lengths = [20, 9]
    query, key, value = states(lengths, 4, 4, 32)
    segments, masking = Segments.of(lengths), Masking(scale=0.2, causal=False)
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value)]  # columns not contiguous
    assert apart[0].stride(2) != 1
    by_head = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (query, key, value)]
    expected = native.attend(query, key, value, segments, masking)
    assert torch.equal(native.attend(*by_head, segments, masking), expected)
    assert native.fits(*by_head, segments, masking)
    for number in range(3):  # one operand is enough
        mixed = [*by_head[:number], apart[number], *by_head[number + 1 :]]
        assert not native.fits(*mixed, segments, masking)
    other = attend(*apart, segments, masking)
    torch.testing.assert_close(other.float(), reference(*apart, segments, masking), **TOLERANCE)


@built
@by_each_kernel
@pytest.mark.parametrize(
    "masking",
    [Masking(scale=0.2, causal=False), Masking(scale=0.2, causal=True, window=70)],
    ids=["full", "causal window"],
)
def test_threads_change_nothing(masking):
    lengths = [1200, 3, 40, 40, 700]
    qkv, segments = states(lengths, 4, 2, 32), Segments.of(lengths)
    outputs = []
    for threads in (1, 2, 5):
        with torch_threads(threads):
            outputs.append(native.attend(*qkv, segments, masking))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


@built
@by_each_kernel
def test_callers_do_not_disturb_each_other():
    lengths = [[50] * 20, [3, 300], [17] * 60, [260, 1]]
    calls = [(states(one, 4, 4, 32), Segments.of(one)) for one in lengths]
    masking = Masking(scale=0.2, causal=False)
    expected = [native.attend(*qkv, segments, masking) for qkv, segments in calls]
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda i: native.attend(*calls[i % 4][0], calls[i % 4][1], masking), range(60)))
    assert all(torch.equal(out, expected[i % 4]) for i, out in enumerate(outputs))


@built
@by_each_kernel
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_stay_in_their_text(bad):
    lengths = [18, 33, 5]
    query, key, value = (x.clone() for x in states(lengths, 4, 4, 32))
    segments, masking = Segments.of(lengths), Masking(scale=0.2, causal=False)
    good = native.attend(query, key, value, segments, masking)
    for states_of in (query, key, value):
        states_of[18:51, 1] = bad
    out = native.attend(query, key, value, segments, masking)
    assert out[18:51, 1].isnan().all() or not out[18:51, 1].isfinite().any()
    out[18:51, 1] = good[18:51, 1]
    assert torch.equal(out, good)


@built
def test_which_kernel_serves_a_call():
    segments, causal = Segments.of([4]), Masking(scale=1.0, causal=True)
    qkv = states([4], 2, 2, 32)
    assert select(*qkv, segments, causal) is native
    odd = [torch.zeros(4, 2, 24, dtype=torch.bfloat16)] * 3
    assert select(*odd, segments, causal) is matmul_attention
    assert select(*(x.float() for x in qkv), segments, causal) is sdpa
    assert select(*qkv, segments, replace(causal, bias=torch.zeros(2, 4, 4))) is matmul_attention
    assert select(*qkv, segments, replace(causal, bias=torch.zeros(2, 4, 4).bfloat16())) is native


@built
def test_both_sides_agree_on_a_call():
    assert ctypes.sizeof(native._AttentionCall) == library().millpond_attention_call_bytes()


@built
def test_operands_that_do_not_fit_are_refused():
    lengths = [20, 9]
    query, key, value = states(lengths, 4, 2, 32)
    segments, masking = Segments.of(lengths), Masking(scale=0.2, causal=False)
    for bias in (torch.zeros(1, 20, 20), torch.zeros(4, 19, 19)):
        assert not native._shapes_agree(query, key, value, segments, bias.bfloat16())
    assert not native._shapes_agree(query, key, value[:, :, :16], segments, None)
    assert not native._shapes_agree(query[:, :3], key, value, segments, None)
    assert not native._shapes_agree(query[:28], key[:28], value[:28], segments, None)
    assert native._shapes_agree(query, key, value, segments, None)
    assert native.fits(query, key, value, segments, masking)
    for unfit in (
        (query, key.float(), value.float()),
        (query, key, value[:, :, :16]),
        (query[:28], key[:28], value[:28]),
        (query.float().bfloat16().requires_grad_(), key, value),
    ):
        assert not native.fits(*unfit, segments, masking)
    assert not native.fits(query, key, value, segments, replace(masking, bias=torch.zeros(4, 19, 19).bfloat16()))


@built
def test_norms_of_operands_that_do_not_fit():
    norm = AddNorm(norms(384).bfloat16())
    wide, row = torch.randn(5, 384), torch.randn(1, 384)
    with torch.inference_mode():
        one_row = norm(wide.bfloat16(), row.bfloat16())  # the residual is broadcast
        torch.testing.assert_close(one_row.float(), norms(384)(wide + row), atol=0.1, rtol=0.05)
        both = AddNorm(norms(384).bfloat16()).float()(wide.clone(), wide)
        torch.testing.assert_close(both, norms(384)(2 * wide))
        changed = AddNorm(norms(384).bfloat16())
        changed.norm.load_state_dict({"weight": torch.ones(384), "bias": torch.zeros(384)})
        out = changed(wide.bfloat16(), wide.bfloat16())
        expected = torch.nn.functional.layer_norm(2 * wide.bfloat16().float(), (384,))
        torch.testing.assert_close(out.float(), expected, atol=1e-3, rtol=2**-7)
    rms = RMSNorm(torch.ones(2, 64).bfloat16(), 1e-6)
    assert not rms._suits(torch.ones(3, 5, 64).bfloat16())
    assert not RMSNorm(torch.ones(64).bfloat16(), 1e-6)._suits(torch.ones(3, 4096).bfloat16())
    assert not rms._suits(torch.ones(3, 64).bfloat16())


# --- Sums and norms ---------------------------------------------------------------------------------------------------


def norms(dim, *, eps=1e-5):
    generator = torch.Generator().manual_seed(dim)
    norm = torch.nn.LayerNorm(dim, eps=eps)
    with torch.inference_mode():
        norm.weight.copy_(torch.randn(dim, generator=generator).bfloat16())
        norm.bias.copy_(torch.randn(dim, generator=generator).bfloat16())
    return norm


@built
@pytest.mark.parametrize(("dim", "rows"), [(16, 700), (48, 1), (48, 65), (384, 2), (384, 64), (4096, 63)])
def test_a_sum_and_its_norm(dim, rows):
    generator = torch.Generator().manual_seed(rows)
    states, residual = (3 + torch.randn(rows, dim, generator=generator).bfloat16() for _ in range(2))
    norm = norms(dim)
    expected = norm(states.float() + residual.float())
    kept = residual.clone()
    with torch.inference_mode():
        out = AddNorm(norms(dim).bfloat16())(states, residual)
    assert out.data_ptr() == states.data_ptr()  # in place
    torch.testing.assert_close(out.float(), expected, atol=1e-3, rtol=2**-7)
    assert torch.equal(residual, kept)


@built
def test_rows_of_a_wider_tensor():
    wide = torch.randn(20, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = norms(32)(wide[:, :32].float() + wide[:, 64:].float())
    middle = wide[:, 32:64].clone()
    with torch.inference_mode():
        out = AddNorm(norms(32).bfloat16())(wide[:, :32], wide[:, 64:])
    torch.testing.assert_close(out.float(), expected, atol=1e-3, rtol=2**-7)
    assert torch.equal(wide[:, 32:64], middle)


@pytest.mark.parametrize("norm", [norms(384), norms(24).bfloat16(), torch.nn.LayerNorm(32, bias=False).bfloat16()])
def test_other_norms_are_torchs(norm, monkeypatch):
    (dim,) = norm.normalized_shape
    states, residual = (torch.randn(5, dim).to(norm.weight.dtype) for _ in range(2))
    expected = norm(states + residual)
    monkeypatch.setattr("millpond.backends.torch.operands.library", None)  # must not be called
    torch.testing.assert_close(AddNorm(norm)(states, residual), expected)


# --- Norms of heads, and rotary positions -----------------------------------------------------------------------------


@built
@pairwise(shape=[(1, 16), (65, 48), (700, 1024), (3, 5, 16), (130, 4, 128)], centred=[False, True])
def test_an_rms_norm(shape, centred):
    generator = torch.Generator().manual_seed(sum(shape))
    rows = 3 * torch.randn(shape, generator=generator).bfloat16()
    weight = torch.randn(shape[-1] if len(shape) == 2 else shape[1:], generator=generator).bfloat16()
    wide = rows.float()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * (weight.float() + float(centred))
    norm = RMSNorm(weight, 1e-6, centred=centred)
    assert norm._suits(rows)
    torch.testing.assert_close(norm(rows).float(), expected, atol=1e-3, rtol=2**-7)


@built
def test_an_rms_norm_of_heads_between_others():
    fused = torch.randn(70, 6, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    norm = RMSNorm(torch.rand(4, 32).bfloat16(), 1e-6)
    assert norm._suits(fused[:, 1:5])
    assert torch.equal(norm(fused[:, 1:5]), norm(fused[:, 1:5].contiguous()))


@built
@pytest.mark.parametrize("shape", [(1, 1, 32), (33, 6, 64), (200, 3, 128), (5, 2, 96)], ids=str)
def test_rotary_positions(shape, monkeypatch):
    generator = torch.Generator().manual_seed(sum(shape))
    fused = torch.randn(shape[0], shape[1] + 2, shape[2], generator=generator).bfloat16()
    states = fused[:, 1 : 1 + shape[1]]
    angles = torch.rand(shape[0], 1, shape[2] // 2, generator=generator).repeat(1, 1, 2) * 6
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    kept = fused.clone()
    out = apply_rotary(states, cos, sin)
    expected = apply_rotary(states.float(), cos.float(), sin.float())
    torch.testing.assert_close(out.float(), expected, atol=1e-3, rtol=2**-7)
    assert torch.equal(fused, kept)
    monkeypatch.setattr("millpond.backends.torch.operands.library", lambda: None)
    assert (apply_rotary(states, cos, sin) - out).abs().max() < 0.06  # rounded three times more
    assert (apply_rotary(states, cos, -sin) - out).abs().max() > 0.1 or shape[0] == 1


@built
def test_norms_and_rotary_positions_of_many_threads():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(999, 4, 64, generator=generator).bfloat16()
    angles = torch.rand(999, 1, 64, generator=generator).bfloat16()
    norm = RMSNorm(torch.rand(4, 64).bfloat16(), 1e-6)
    states, residual = (torch.randn(999, 384, generator=generator).bfloat16() for _ in range(2))
    add_norm = AddNorm(norms(384).bfloat16().requires_grad_(False))
    with torch_threads(1):
        one = apply_rotary(norm(rows), angles.cos(), angles.sin()), add_norm(states.clone(), residual)
    with torch_threads(3):
        other = apply_rotary(norm(rows), angles.cos(), angles.sin()), add_norm(states.clone(), residual)
    assert all(map(torch.equal, one, other))
