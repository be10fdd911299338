"""The kernels in Triton beside torch's operators: compiled on a GPU, elsewhere by Triton's interpreter."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
pytest.importorskip("triton")

from millpond.backends.torch.attention import sdpa, triton  # noqa: E402
from millpond.backends.torch.attention.segments import Segments  # noqa: E402
from millpond.backends.torch.attention.signature import Masking  # noqa: E402
from millpond.backends.torch.cuda import fused  # noqa: E402
from millpond.late_interaction import cuda  # noqa: E402
from millpond.late_interaction.codecs.rows import CODECS  # noqa: E402
from millpond.vectors.ragged import Ragged  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
DEVICE = "cuda" if CUDA else "cpu"
HALVES = [torch.float16, torch.bfloat16] if CUDA else [torch.float16]  # the interpreter multiplies no bfloat16
MASKINGS = {
    "full": {"causal": False},
    "causal": {"causal": True},
    "window": {"causal": False, "window": 9},
    "causal window, softcap": {"causal": True, "window": 9, "softcap": 2.0},
    "bias": {"causal": False},
}


def drawn(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device=DEVICE, dtype=dtype)


def near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> bool:
    return bool((found.float() - expected).abs().max() <= scale * (0.004 if dtype is torch.float16 else 0.03))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("limited", [False, True], ids=["", "limited keys"])
@pytest.mark.parametrize("masking", MASKINGS)
@pytest.mark.parametrize("lengths", [(5, 1, 16), (30, 7), (64, 33, 2), (100, 3, 70)], ids=str)
def test_attention_in_every_block(lengths, masking, limited, dtype):
    """Blocks of 16, 32 and 64 queries, and several of them; a query that may see no key gives zeros."""
    for heads, kv_heads, dim in ((2, 2, 32), (4, 2, 24), (2, 1, 64)):
        states = drawn(sum(lengths), heads + 2 * kv_heads, dim, dtype=dtype)
        query, key, value = states.split((heads, kv_heads, kv_heads), 1)
        bias = drawn(heads, max(lengths), max(lengths), dtype=dtype) if masking == "bias" else None
        called = Masking(scale=dim**-0.5, bias=bias, **MASKINGS[masking])
        keys = [max(1, length // 3) for length in lengths] if limited else None
        out = triton.attend(query, key, value, Segments.of(lengths, DEVICE, keys=keys), called)
        exact = replace(called, bias=None if bias is None else bias.float().cpu())
        rows = (part.float().cpu() for part in (query, key, value))
        assert near(out.cpu(), sdpa.attend(*rows, Segments.of(lengths, keys=keys), exact), dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("width", [384, 100, 1024])
def test_sums_and_norms(width, dtype):
    hidden, states, weight, bias = (
        drawn(*shape, dtype=dtype) for shape in ((7, width), (7, width), (width,), (width,))
    )
    total = hidden + states
    kept = hidden.clone()
    out = fused.add_layer_norm(kept, states, weight, bias, 1e-5, keep=True)
    expected = F.layer_norm(total.float(), (width,), weight.float(), bias.float(), 1e-5)
    assert near(out, expected, dtype, 4) and torch.equal(kept, total)
    unkept = hidden.clone()
    fused.add_layer_norm(unkept, states, weight, None, 1e-5, keep=False)
    assert torch.equal(unkept, hidden)
    alone = fused.add_rms_norm(hidden, None, weight, 1e-6, keep=True, centred=False)
    assert near(alone, F.rms_norm(hidden.float(), (width,), weight.float(), 1e-6), dtype, 4)
    centred = fused.add_rms_norm(kept.copy_(hidden), states, weight, 1e-6, keep=True, centred=True)
    assert near(centred, F.rms_norm(total.float(), (width,), weight.float() + 1, 1e-6), dtype, 4)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("activation", fused.ACTIVATIONS)
def test_gates(activation, dtype):
    joined = 2 * drawn(5, 2 * 300, dtype=dtype)
    tanh = {"approximate": "tanh"} if activation.startswith("gelu_") else {}
    activate = getattr(F, activation.partition("_")[0])
    gate, up = joined.float().chunk(2, 1)
    assert near(fused.gated(joined, activation), activate(gate, **tanh) * up, dtype, 6)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("normed", [False, True], ids=["", "norm"])
def test_rotations_are_in_place(normed, dtype):
    states, cos, sin = (drawn(*shape, dtype=dtype) for shape in ((6, 10, 64), (6, 1, 64), (6, 1, 65)))
    sin, weight, before = sin[..., :64].contiguous(), drawn(7, 64, dtype=dtype), states.clone()
    rows = before[:, :7].float()
    if normed:
        rows = F.rms_norm(rows, (64,), None, 1e-6) * weight.float()
    turned = rows * cos.float() + torch.cat((-rows[..., 32:], rows[..., :32]), -1) * sin.float()
    fused.rotate(states[:, :7], cos, sin, norm=weight if normed else None, eps=1e-6)
    assert near(states[:, :7], turned, dtype, 6) and torch.equal(states[:, 7:], before[:, 7:])


@pytest.mark.parametrize("dim", [128, 96])
@pytest.mark.parametrize("name", ["float32", "int8", *(["bfloat16"] if CUDA else [])])
def test_maxsim(name, dim, monkeypatch):
    """Documents of no, few and many tokens, queries of none and of more than a block; a NaN stays one."""
    if not CUDA:
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    random = np.random.default_rng(0)
    offsets = np.cumsum([0, 5, 70, 0, 130, 1, 64])
    rows = random.standard_normal((offsets[-1], dim), dtype=np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    asked = np.cumsum([0, 3, 70, 0, 33])
    queries = Ragged(flat=random.standard_normal((asked[-1], dim), dtype=np.float32), offsets=asked)
    codec = CODECS[name]
    stored = cuda.DeviceMemory(torch.device(DEVICE)).rows(codec, codec.width(dim), int(offsets[-1]))
    stored.write(0, *codec.pack(rows))
    on_device = torch.from_numpy(offsets).to(DEVICE)
    for documents in (None, np.array([3, 0, 1])):
        expected = cuda._score(queries, tokens=stored, offsets=offsets, documents=documents)
        found = cuda._score_by_kernel(queries, tokens=stored, offsets=on_device, documents=documents)
        np.testing.assert_allclose(found, expected, atol=2e-4)
    if name == "float32":
        rows[2, 0] = np.nan
        stored.write(0, *codec.pack(rows))
        found = cuda._score_by_kernel(queries, tokens=stored, offsets=on_device)
        assert np.isnan(found[[0, 1, 3], 0]).all() and np.isfinite(found[:, 1]).all()
