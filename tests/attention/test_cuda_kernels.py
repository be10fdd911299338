"""The kernels of torch for CUDA: what FlexAttention and the packed flash attention are given, on a CPU."""

from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dispatched import Dispatched
from tests.pairwise import pairwise
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from millpond.backends.torch.attention import flex, kernels, matmul_attention, native, sdpa, varlen
from millpond.backends.torch.attention.key_blocks import BLOCK, KeyBlocks
from millpond.backends.torch.attention.segments import Fixed, Segments
from millpond.backends.torch.attention.signature import KernelError, Masking
from tests import recording

# --- FlexAttention ----------------------------------------------------------------------------------------------------


# Lengths, and keys of some of them.
LAYOUTS = {
    "one token": ([1], None),
    "one text": ([7], None),
    "one block": ([BLOCK], None),
    "one token more": ([BLOCK + 1], None),
    "several blocks": ([5 * BLOCK + 3], None),
    "edges of blocks": ([BLOCK - 1, 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1], None),
    "many": ([3, 40, 7, 1, 200, 64, 128, 9, 500, 2, 2, 2], None),
    "single tokens": ([1] * 300, None),
    "queries": ([32] * 9, [5, 32, 1, 7, 7, 20, 32, 3, 9]),
    "few keys in long texts": ([400, 10, 300, 1, 129], [1, 10, 299, 1, 128]),
}
WINDOWS = [None, 1, 5, 130, 300, 100_000]


def packed(name):
    lengths, keys = LAYOUTS[name]
    return Segments.of(lengths, keys=keys)


def allowed(segments, causal, window):
    """bool [tokens, tokens], written out."""
    keys = segments.keys or segments.lengths
    text = torch.tensor([i for i, length in enumerate(segments.lengths) for _ in range(length)])
    place = torch.cat([torch.arange(length) for length in segments.lengths])
    distance = place[:, None] - place[None, :]
    inside = (text[:, None] == text[None, :]) & (place < torch.tensor(keys)[text])[None, :]
    if causal:
        inside &= distance >= 0
    if window is not None:
        inside &= distance.abs() < window
    return inside


def states(segments, heads=2, kv_heads=1, dim=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    shapes = [(segments.total, count, dim) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def listed(counts, indices):
    """The blocks that each block of rows names."""
    return [set(row[:count].tolist()) for count, row in zip(counts[0, 0].tolist(), indices[0, 0], strict=True)]


@st.composite
def layouts(draw):
    """Lengths around the blocks' size, and for some texts fewer keys."""
    near = st.integers(1, 40) | st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 5 * BLOCK + 3])
    lengths = draw(st.lists(near, min_size=1, max_size=9))
    keys = draw(st.none() | st.tuples(*(st.integers(1, length) for length in lengths)))
    return Segments.of(lengths, keys=keys)


@settings(derandomize=True, max_examples=15, deadline=None)
@given(segments=layouts(), causal=st.booleans(), window=st.sampled_from(WINDOWS))
def test_blocks_and_attention_are_those_of_the_mask_written_out(segments, causal, window):
    check_blocks(segments, causal, window)
    with pytest.MonkeyPatch.context() as patch:  # else torch traces each call anew, which takes seconds
        patch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        masking = Masking(scale=0.3, causal=causal, window=window, softcap=2.0)
        q, k, v = states(segments)
        out = flex.attend(q, k, v, segments, masking, flex=flex_attention)
        torch.testing.assert_close(out, sdpa.attend(q, k, v, segments, masking), atol=2e-6, rtol=1e-5)


def check_blocks(segments, causal, window):
    made = KeyBlocks.of(segments, causal=causal, window=window)
    truth = allowed(segments, causal, window)
    key = torch.arange(segments.total)
    assert torch.equal((key >= made.first[:, None]) & (key < made.stop[:, None]), truth)
    blocks = -(-segments.total // BLOCK)
    filled = torch.zeros(blocks * BLOCK, blocks * BLOCK, dtype=torch.bool)
    filled[: segments.total, : segments.total] = truth
    tiles = filled.view(blocks, BLOCK, blocks, BLOCK).transpose(1, 2).flatten(2)  # [blocks, blocks, pairs]
    full = [set(row.nonzero()[:, 0].tolist()) for row in tiles.all(2)]
    reached = [set(row.nonzero()[:, 0].tolist()) for row in tiles.any(2)]
    partial_ = listed(made.partial_count, made.partial)
    assert listed(made.full_count, made.full) == full
    for masked, whole, needed in zip(partial_, full, reached, strict=True):
        assert not masked & whole and masked | whole >= needed
        # Between keys that are left out, blocks may be named that the mask then empties.
        assert segments.keys is not None or masked | whole == needed
    for indices in (made.partial, made.full):
        assert indices.dtype == torch.int32 and indices.min() >= 0 and indices.max() < blocks


LONG = 1 << 15


@pytest.mark.parametrize("lengths", [[LONG], [8] * (LONG // 8), [5000] * 6 + [1, LONG - 30_001]])
@pytest.mark.parametrize("window", [None, 4096])
def test_nothing_has_a_row_and_a_column_for_each_token(lengths, window):
    """At 32 k tokens a mask of all pairs takes 1 GB, and their distances 8 GB; here nothing takes 1 MB."""
    segments = Segments.of(lengths)
    with Dispatched() as dispatched:
        KeyBlocks.of(segments, causal=True, window=window)
    assert dispatched.largest <= 1 << 20
    assert dispatched.number < 60
    few = Segments.of([4096])
    truth = flex.key_blocks(few, Masking(scale=1.0, causal=True, softcap=1.0))
    with Dispatched() as control:  # what is measured would show the dense mask
        create_block_mask(lambda b, h, q, k: q >= truth.first[k], None, None, 4096, 4096, device="cpu")
    assert control.largest >= 4096**2


def test_the_blocks_are_made_once_for_all_layers(monkeypatch):
    made = []
    right = KeyBlocks.of.__func__
    monkeypatch.setattr(
        KeyBlocks, "of", classmethod(lambda cls, *call, **options: made.append(options) or right(cls, *call, **options))
    )
    segments = packed("many")
    for _ in range(13):
        for window in (None, 64, 100_000):  # the last one limits no text
            flex.key_blocks(segments, Masking(scale=1.0, causal=True, window=window, softcap=50.0))
    assert made == [{"causal": True, "window": None}, {"causal": True, "window": 64}]
    flex.key_blocks(packed("many"), Masking(scale=1.0, causal=True, softcap=50.0))
    assert len(made) == 3  # another forward


def test_a_graph_can_hold_the_blocks():
    """Made from the cumulative lengths on the device, with empty sequences at the end, and no lengths on the host."""
    ends = torch.tensor([0, 100, 300, 512, 512, 512], dtype=torch.int32)
    static = Fixed(cu_seqlens=ends, max_seqlen=256, total=512)
    made = KeyBlocks.of(static, causal=True, window=50)
    same = KeyBlocks.of(Segments.of([100, 200, 212]), causal=True, window=50)
    for name in ("first", "stop", "partial_count", "full_count", "partial", "full"):
        assert torch.equal(getattr(made, name), getattr(same, name))


@pytest.fixture
def flex_on_cpu(monkeypatch):
    """The table's kernel ``flex`` serves softcaps on this CPU, forgetting afterwards what it compiled."""
    for kernel in (native, matmul_attention):
        monkeypatch.setattr(kernel, "fits", lambda *call: False)
    monkeypatch.setattr(flex, "_ran", set())
    monkeypatch.setattr(flex, "_refused", set())
    right = flex.fits

    def fits(query, key, value, segments, masking):
        there = SimpleNamespace(device=torch.device("cuda"), dtype=query.dtype, shape=query.shape)
        return right(there, key, value, segments, masking)

    # A kind names its device, so that fits finds it again.
    kind = flex._Kind.of
    monkeypatch.setattr(
        flex._Kind,
        "of",
        lambda query, *rest: kind(
            SimpleNamespace(device=torch.device("cuda"), dtype=query.dtype, shape=query.shape), *rest
        ),
    )
    monkeypatch.setattr(flex, "fits", fits)
    monkeypatch.setattr(flex, "_compiled", cache(flex._compiled.__wrapped__))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def traced_only(monkeypatch):
    """torch.compile traces as always, but generates no code, which takes most of the time."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


def compilations():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


CAPPED = Masking(scale=0.25, causal=True, softcap=2.0)
ORDER = ["many", "one text", "several blocks", "one block", "queries", "one token more", "edges of blocks"]


@pytest.mark.contract  # traces
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("flex_on_cpu", "traced_only")
def test_lengths_windows_and_keys_need_few_compilations():
    torch._dynamo.utils.counters.clear()
    for name in ORDER:
        segments = packed(name)
        for window in (None, 5, 77, 130):
            for causal in (True, False):
                masking = Masking(scale=0.25, causal=causal, window=window, softcap=2.0)
                out = kernels.attend(*states(segments), segments, masking)
                expected = sdpa.attend(*states(segments), segments, masking)
                torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
    assert compilations() == 2  # more than one block of tokens, and one
    assert not flex._refused


@pytest.mark.contract  # traces
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("flex_on_cpu", "traced_only")
def test_many_models_do_not_share_a_limit_of_compilations(monkeypatch):
    monkeypatch.setattr(flex, "_COMPILATIONS", 3)
    segments = packed("one text")
    for heads in range(1, 11):  # torch's limit for one function is 8
        masking = Masking(scale=0.25, causal=True, softcap=float(heads))
        q, k, v = states(segments, heads=heads)
        torch.testing.assert_close(
            kernels.attend(q, k, v, segments, masking), sdpa.attend(q, k, v, segments, masking), atol=2e-6, rtol=1e-5
        )
    assert len(flex._ran) == 10 and not flex._refused


@pytest.mark.usefixtures("flex_on_cpu")
def test_nothing_runs_uncompiled(caplog):
    """A process that switches the compiler off gets the next kernel, and one warning, not gigabytes of scores."""
    segments = packed("many")
    q, k, v = states(segments)
    expected = sdpa.attend(q, k, v, segments, CAPPED)
    with torch.compiler.set_stance("force_eager"), caplog.at_level("WARNING", logger="millpond"):
        for _ in range(3):
            assert torch.equal(kernels.attend(q, k, v, segments, CAPPED), expected)
    assert kernels.select(q, k, v, segments, CAPPED) is sdpa
    [message] = caplog.messages
    for part in ("flex", torch.__version__, "2 heads of 16 in float32", "compiler is switched off", "Triton"):
        assert part in message


@pytest.mark.contract  # traces
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("flex_on_cpu", "traced_only")
def test_a_limit_of_compilations_is_no_way_to_run_uncompiled(monkeypatch):
    monkeypatch.setattr(flex, "_COMPILATIONS", 1)
    with torch._dynamo.config.patch(recompile_limit=1):
        short, long = packed("one text"), packed("many")
        kernels.attend(*states(short), short, CAPPED)
        with pytest.raises(KernelError, match="cannot compile"):
            flex.attend(*states(long), long, CAPPED)


@pytest.mark.usefixtures("flex_on_cpu")
@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError, torch.AcceleratorError])
def test_lack_of_memory_and_a_lost_device_say_nothing_of_the_kernel(error, monkeypatch):
    def failing(*operands):
        try:
            raise error("12 GB")
        except error as reason:
            raise RuntimeError("while compiling") from reason

    monkeypatch.setattr(flex, "_compiled", lambda kind: failing)
    segments = packed("one text")
    with pytest.raises(RuntimeError, match="while compiling"):
        kernels.attend(*states(segments), segments, CAPPED)
    assert not flex._refused


@pytest.mark.usefixtures("flex_on_cpu")
def test_an_error_after_a_first_run_is_an_error():
    """What ran before is compiled: an error then is about this call, and is not hidden by a slower kernel."""
    segments = packed("one text")
    operands = states(segments)
    flex._ran.add(flex._Kind.of(operands[0], operands[1], CAPPED))

    def failing(kind):
        def call(*operands):
            raise ValueError("of this call")

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "_compiled", failing)
        with pytest.raises(ValueError, match="of this call"):
            kernels.attend(*operands, segments, CAPPED)


def test_narrow_heads_and_refused_kinds_do_not_fit(monkeypatch):
    segments = packed("one text")

    def fits(dim, **changes):
        there = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, shape=torch.Size((7, 2, dim)))
        key = torch.zeros(7, 1, dim, dtype=torch.bfloat16)
        masking = Masking(**{"scale": 0.25, "causal": True, "softcap": 2.0, **changes})
        return flex.fits(there, key, key, segments, masking), flex._Kind.of(there, key, masking)

    assert fits(16)[0] and not fits(8)[0]
    monkeypatch.setattr(flex, "_refused", {fits(16)[1]})
    assert not fits(16)[0] and fits(16, softcap=3.0)[0] and fits(32)[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("flex_on_cpu")
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_compiled_code_equals_the_reference(kv_heads):
    """torch's generated code for a CPU walks the blocks, as Triton's does: a block left out or too many shows."""
    for name in LAYOUTS:
        segments = packed(name)
        for window in (None, 5, 130):
            for causal in (True, False):
                masking = Masking(scale=0.25, causal=causal, window=window, softcap=2.0)
                q, k, v = states(segments, kv_heads=kv_heads)
                out = kernels.attend(q, k, v, segments, masking)
                torch.testing.assert_close(out, sdpa.attend(q, k, v, segments, masking), atol=2e-5, rtol=1e-4)
    assert not flex._refused


# --- torch's packed flash attention: what it is called with, on every torch that has it -------------------------------


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
