"""The packed kernels on a GPU, against the reference kernel in float32."""

import pytest
import torch

from millpond.attention import flex, sdpa, varlen
from millpond.attention.kernels import attend, select
from millpond.attention.segments import Segments
from millpond.attention.signature import Masking

pytestmark = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="this kernel needs CUDA")

LENGTHS = {
    "mixed": [1, 7, 500, 33, 2, 128, 128, 64],
    "single tokens": [1] * 300,
    "one long": [4096],
    "equal": [50] * 40,
}
HEADS = {"plain": (12, 12, 64), "grouped": (16, 2, 128), "narrow": (12, 12, 32), "wide": (4, 1, 256)}
WINDOWS = {"full": None, "window": 65, "wider than all": 100_000}


def states(lengths, heads, dtype, device):
    query_heads, kv_heads, dim = heads
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths), count, dim) for count in (query_heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator).to(device=device, dtype=dtype) for shape in shapes]


def compare(out, q, k, v, lengths, masking, tolerance, keys=None):
    """Compare ``out`` with the reference kernel over the same rounded inputs, in float32 on the CPU."""
    reference = sdpa.attend(*(x.float().cpu() for x in (q, k, v)), Segments.of(lengths, keys=keys), masking)
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out.float().cpu(), reference, atol=tolerance, rtol=tolerance)


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS.keys())
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_varlen_equals_the_reference(lengths, heads, window, causal, dtype):
    q, k, v = states(lengths, heads, dtype, "cuda")
    masking = Masking(scale=heads[2] ** -0.5, causal=causal, window=window)
    segments = Segments.of(lengths, "cuda")
    assert select(q, k, v, segments, masking) is varlen
    out = varlen.attend(q, k, v, segments, masking)
    compare(out, q, k, v, lengths, masking, 4e-3 if dtype is torch.float16 else 3e-2)


@needs_cuda
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS.keys())
@pytest.mark.parametrize("heads", [HEADS["plain"], HEADS["grouped"], HEADS["wide"]])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_flex_equals_the_reference(lengths, heads, window, causal):
    q, k, v = states(lengths, heads, torch.bfloat16, "cuda")
    masking = Masking(scale=heads[2] ** -0.5, causal=causal, window=window, softcap=5.0)
    segments = Segments.of(lengths, "cuda")
    assert select(q, k, v, segments, masking) is flex
    out = flex.attend(q, k, v, segments, masking)
    compare(out, q, k, v, lengths, masking, 3e-2)


@needs_cuda
@pytest.mark.parametrize("softcap", [None, 5.0], ids=["varlen", "flex"])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS.keys())
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("lengths", [[32] * 20, [32, 32, 500, 7, 32, 128]], ids=["queries", "mixed"])
def test_fewer_keys_than_queries(lengths, heads, window, softcap):
    """Queries of 32 tokens with expansion tokens that are no keys, batched with documents whose tokens all are keys."""
    keys = [3 + i if length == 32 else length for i, length in enumerate(lengths)]
    q, k, v = states(lengths, heads, torch.bfloat16, "cuda")
    masking = Masking(scale=heads[2] ** -0.5, causal=False, window=window, softcap=softcap)
    out = attend(q, k, v, Segments.of(lengths, "cuda", keys=keys), masking)
    compare(out, q, k, v, lengths, masking, 3e-2, keys=keys)
    with pytest.raises(AssertionError):
        compare(out, q, k, v, lengths, masking, 3e-2)


@needs_cuda
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_float32_on_cuda_takes_the_reference_kernel(lengths):
    q, k, v = states(lengths, HEADS["grouped"], torch.float32, "cuda")
    masking = Masking(scale=0.1, causal=True, window=65)
    segments = Segments.of(lengths, "cuda")
    assert select(q, k, v, segments, masking) is sdpa
    compare(sdpa.attend(q, k, v, segments, masking), q, k, v, lengths, masking, 1e-4)


@pytest.mark.parametrize("heads", [HEADS["plain"], HEADS["grouped"]])
def test_a_wrong_window_is_seen(heads):
    """Negative control, on any device: a window wider by one token exceeds the tolerances clearly."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lengths = LENGTHS["mixed"]
    q, k, v = states(lengths, heads, torch.bfloat16, device)
    masking = Masking(scale=heads[2] ** -0.5, causal=True, window=5)
    wider = Masking(scale=heads[2] ** -0.5, causal=True, window=6)
    out = attend(q, k, v, Segments.of(lengths, device), wider)
    with pytest.raises(AssertionError):
        compare(out, q, k, v, lengths, masking, 3e-2)
