"""torch's packed flash attention for CUDA: what it is called with on a CPU, on every torch that has it."""

from types import SimpleNamespace

import pytest
import torch
from tests.pairwise import pairwise

from millpond.backends.torch.attention import sdpa, varlen
from millpond.backends.torch.attention.segments import Segments
from millpond.backends.torch.attention.signature import Masking
from tests import recording

MIXED = [5, 1, 9, 9, 30]


def cut_out(dim=16, heads=4, dtype=torch.float32):
    """Queries, keys and values as the models cut them out of one product."""
    total = sum(MIXED)
    qkv = torch.randn(total, 3 * heads * dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    return qkv.unflatten(-1, (3, heads, dim)).unbind(1)


@pytest.fixture
def called(monkeypatch):
    """What torch's kernel is called with."""
    calls = []

    def kernel(*operands, **options):
        calls.append((operands, options))
        return recording.varlen_attn(*operands, **options)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    return calls


def releases(*more):
    return lambda: frozenset(("scale", "window_size", *more))


RELEASES = {"2.11": (), "2.12": ("enable_gqa", "seqused_k")}


@pairwise(kv_heads=[4, 2, 1], release=list(RELEASES), causal=[False, True], window=[None, 4])
def test_every_release_computes_the_same(release, kv_heads, causal, window, called, monkeypatch):
    monkeypatch.setattr(varlen, "parameters", releases(*RELEASES[release]))
    q, k, v = cut_out()
    k, v = k[:, :kv_heads], v[:, :kv_heads]
    masking = Masking(scale=0.25, causal=causal, window=window)
    out = varlen.attend(q, k, v, Segments.of(MIXED), masking)
    torch.testing.assert_close(out, sdpa.attend(q, k, v, Segments.of(MIXED), masking), atol=2e-6, rtol=1e-5)
    [(operands, options)] = called
    grouped = kv_heads < 4
    assert options.get("enable_gqa", False) == (grouped and release == "2.12")
    assert operands[1].shape[1] == (4 if release == "2.11" else kv_heads)
    assert set(options) <= {"scale", "window_size", *RELEASES[release]}


@pytest.mark.usefixtures("called")
def test_limited_keys_reach_the_kernel_where_it_takes_them(called, monkeypatch):
    monkeypatch.setattr(varlen, "parameters", releases("enable_gqa", "seqused_k"))
    q, k, v = cut_out()
    segments, masking = Segments.of(MIXED, keys=[2, 1, 9, 3, 30]), Masking(scale=0.25, causal=False)
    out = varlen.attend(q, k, v, segments, masking)
    torch.testing.assert_close(out, sdpa.attend(q, k, v, segments, masking), atol=2e-6, rtol=1e-5)
    assert called[0][1]["seqused_k"].tolist() == [2, 1, 9, 3, 30]
    monkeypatch.setattr(varlen, "parameters", releases())
    assert not varlen.limits_keys(segments, masking)


@pytest.mark.parametrize("dim", [8, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_states_cut_out_of_one_product_are_not_copied(dim, dtype, called, monkeypatch):
    monkeypatch.setattr(varlen, "parameters", releases("enable_gqa"))
    q, k, v = cut_out(dim, dtype=dtype)
    assert not q.is_contiguous()
    varlen.attend(q, k, v, Segments.of(MIXED), Masking(scale=0.25, causal=False))
    operands, _ = called[0]
    assert [states.data_ptr() for states in operands[:3]] == [states.data_ptr() for states in (q, k, v)]


@pytest.mark.parametrize("change", ["columns apart", "rows not aligned", "not aligned"])
def test_what_the_kernel_cannot_read_is_copied(change):
    """It reads 16 bytes at once, from addresses that 16 divides, and numbers of a head in a row."""
    states = {
        "columns apart": torch.zeros(6, 4, 32, dtype=torch.float16)[..., ::2],
        "rows not aligned": torch.zeros(6, 4, 20, dtype=torch.float16)[..., :16],
        "not aligned": torch.zeros(6 * 4 * 16 + 4, dtype=torch.float16)[4:].view(6, 4, 16),
    }[change]
    states.copy_(torch.arange(6 * 4 * 16).view(6, 4, 16))
    read = varlen.readable(states)
    assert read.data_ptr() != states.data_ptr() and torch.equal(read, states)
    assert read.is_contiguous() and varlen.readable(read) is read


def test_a_gpu_before_ampere_is_served_by_another_kernel(monkeypatch):
    """torch's flash attention would raise there, at the first batch."""
    monkeypatch.setattr(varlen, "parameters", releases("enable_gqa", "seqused_k"))
    query = SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float16, shape=torch.Size((54, 4, 16)))
    segments, masking = Segments.of(MIXED), Masking(scale=0.25, causal=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for capability, fits in (((7, 5), False), ((8, 0), True), ((9, 0), True), ((12, 0), True)):
        varlen._new_enough.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert varlen.fits(query, query, query, segments, masking) == fits
        assert (varlen.unavailable() is None) == fits
    varlen._new_enough.cache_clear()
