"""Pooling, reductions in parts and sparse heads: numbers by hand, of each text whatever its batch, without a wait."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from millpond.backends.torch.attention.segments import Fixed, Segments
from millpond.backends.torch.pooling import methods, sparse
from millpond.backends.torch.pooling.masked_lm import MaskedLanguageHead
from millpond.backends.torch.pooling.methods import METHODS
from millpond.backends.torch.pooling.pooler import Pooler
from millpond.backends.torch.pooling.sparse import SpladeHead, TokenWeightHead
from millpond.checkpoints.modules import Pooling

# --- Pooling methods against numbers computed by hand -----------------------------------------------------------------


#              segment of three rows                      | one row
HIDDEN = torch.tensor([[1.0, -4.0], [3.0, 8.0], [5.0, -1.0], [7.0, -2.0]])
SEGMENTS = Segments.of([3, 1])

GOLDEN = {
    "cls": [[1, -4], [7, -2]],
    "lasttoken": [[5, -1], [7, -2]],
    "mean": [[3, 1], [7, -2]],
    "max": [[5, 8], [7, -2]],
    "mean_sqrt_len": [[9 / math.sqrt(3), 3 / math.sqrt(3)], [7, -2]],
    "weightedmean": [[(1 + 6 + 15) / 6, (-4 + 16 - 3) / 6], [7, -2]],
}
# The first token of the first segment is a prompt that pooling leaves out.
GOLDEN_SKIPPED = {
    "cls": [[3, 8], [7, -2]],
    "lasttoken": [[5, -1], [7, -2]],
    "mean": [[4, 3.5], [7, -2]],
    "max": [[5, 8], [7, -2]],
    "mean_sqrt_len": [[8 / math.sqrt(2), 7 / math.sqrt(2)], [7, -2]],
    "weightedmean": [[(6 + 15) / 5, (16 - 3) / 5], [7, -2]],
}


@pytest.mark.parametrize("mode", METHODS)
def test_golden(mode):
    torch.testing.assert_close(METHODS[mode](HIDDEN, SEGMENTS, None), torch.tensor(GOLDEN[mode], dtype=torch.float32))


@pytest.mark.parametrize("mode", METHODS)
def test_golden_without_the_prompt(mode):
    skip = torch.tensor([1, 0], dtype=torch.int32)
    expected = torch.tensor(GOLDEN_SKIPPED[mode], dtype=torch.float32)
    torch.testing.assert_close(METHODS[mode](HIDDEN, SEGMENTS, skip), expected)


@pytest.mark.parametrize("mode", METHODS)
def test_neighbours_do_not_matter(mode):
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(40, 8, generator=generator)
    together = METHODS[mode](rows, Segments.of([11, 1, 28]), None)
    alone = METHODS[mode](rows[11:12], Segments.of([1]), None)
    torch.testing.assert_close(together[1:2], alone)
    last = METHODS[mode](rows[12:], Segments.of([28]), None)
    torch.testing.assert_close(together[2:], last)


# --- Sparse weights as a GPU computes them: nothing waits before the batch has run, and the weights are the same ------


WIDTH, VOCABULARY = 8, 50
SOME_LENGTHS = ([1], [5], [1, 1, 1], [3, 17, 1, 8, 40, 2], [64, 1, 1, 64])
# Operators whose result has a size that the device decides, or is a number on the host.
WAITING = ("nonzero", "_local_scalar_dense", "unique", "bincount", "masked_select", "is_nonzero", "equal")


class Waits(TorchDispatchMode):
    """Records the operators that would wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        masks = [each for each in (args[1] if name == "index" else ()) if isinstance(each, torch.Tensor)]
        if any(part in name for part in WAITING) or any(mask.dtype is torch.bool for mask in masks):
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


def splade(strategy: Any = "max", activation: Any = "relu", *, logits: int = 7 * VOCABULARY) -> SpladeHead:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {
        "dense": normal(WIDTH, WIDTH),
        "dense_bias": normal(WIDTH),
        "norm": normal(WIDTH),
        "norm_bias": normal(WIDTH),
        "decoder": normal(VOCABULARY, WIDTH),
        "decoder_bias": normal(VOCABULARY) - 3,
    }
    return SpladeHead(MaskedLanguageHead(tensors, "gelu", 1e-6), strategy, activation, logits=logits)


def token_weights() -> TokenWeightHead:
    linear = nn.Linear(WIDTH, 1).requires_grad_(False)
    linear.weight.copy_(torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(2)))
    linear.bias.fill_(0.1)
    return TokenWeightHead(linear, (0, 3))


def texts_of(lengths: Sequence[int], seed: int = 0) -> tuple[torch.Tensor, Segments, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    hidden = torch.randn(total, WIDTH, generator=generator)
    return hidden, Segments.of(lengths), torch.randint(VOCABULARY, (total,), generator=generator)


def same(found: sparse.Weights, expected: sparse.Weights, tolerance: float = 1e-5) -> bool:
    return (
        list(found[2]) == list(expected[2])
        and torch.equal(found[0], expected[0])
        and torch.allclose(found[1], expected[1], atol=tolerance, rtol=tolerance)
        and found[0].dtype == expected[0].dtype
        and found[1].dtype == expected[1].dtype
    )


@pytest.mark.parametrize("lengths", SOME_LENGTHS, ids=str)
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
@pytest.mark.parametrize("strategy", ["max", "sum"])
def test_all_texts_at_once_have_the_weights_of_one_by_one(strategy, activation, lengths):
    head = splade(strategy, activation)
    hidden, segments, ids = texts_of(lengths)
    expected = head.read(hidden, segments, ids)
    assert sum(expected[2]) > 0
    assert same(head.launch(hidden, segments, ids)(), expected)
    for chunk in (1, 2, 100):  # tokens
        head.gpu_chunk = chunk
        assert same(head.launch(hidden, segments, ids)(), expected)
    assert not same(head.launch(hidden.flip(1), segments, ids)(), expected)  # negative control


def test_a_maximum_does_not_depend_on_the_batch():
    head = splade()
    lengths = [3, 17, 1, 8, 40, 2]
    hidden, segments, ids = texts_of(lengths)
    entries, weights, counts = head.launch(hidden, segments, ids)()
    parts = zip(hidden.split(lengths), entries.split(counts), weights.split(counts), ids.split(lengths), strict=True)
    for states, own, values, tokens in parts:
        assert same(head.launch(states, Segments.of([len(tokens)]), tokens)(), (own, values, [len(own)]))


@pytest.mark.parametrize("strategy", ["max", "sum"])
def test_half_precision_is_near(strategy):
    head = splade(strategy)
    hidden, segments, ids = texts_of(SOME_LENGTHS[3])
    seen: list[torch.dtype] = []
    head.vocabulary.register_forward_hook(lambda module, inputs, logits: seen.append(logits.dtype))
    entries, weights, counts = head.launch(hidden, segments, ids, half=True)()
    assert set(seen) == {torch.float16} and weights.dtype is torch.float32
    found, expected = (
        torch.zeros(len(counts), VOCABULARY).index_put_(
            (torch.arange(len(counts)).repeat_interleave(torch.tensor(n)), i.long()), w
        )
        for i, w, n in ((entries, weights, counts), head.read(hidden, segments, ids))
    )
    difference = (found - expected).abs().max() / expected.max()
    assert 0 < difference < 2e-3


def test_on_a_cpu_nothing_is_in_half_precision():
    head = splade()
    hidden, segments, ids = texts_of(SOME_LENGTHS[3])
    for states in (hidden, hidden.bfloat16()):
        assert same(head.launch(states, segments, ids)(), head.read(states, segments, ids))


@pytest.mark.parametrize("head", [splade("max"), splade("sum"), token_weights()], ids=["max", "sum", "tokens"])
def test_only_the_returned_function_waits(head):
    hidden, segments, ids = texts_of(SOME_LENGTHS[3])
    with Waits() as launching:
        finish = head.launch(hidden, segments, ids)
    assert launching.seen == []
    with Waits() as finishing:
        finish()
    assert finishing.seen  # the negative control: it would have been noticed


def test_a_weight_that_is_no_number_is_not_hidden():
    head = splade()
    hidden, segments, ids = texts_of([2, 3])
    hidden[1] = float("nan")
    _, weights, counts = head.launch(hidden, segments, ids)()
    assert weights[: counts[0]].isnan().all() and counts[0] == VOCABULARY
    assert weights[counts[0] :].isfinite().all()


def test_a_text_without_weights_has_none():
    head = splade()
    head.vocabulary.decoder_bias.fill_(-1000.0)
    entries, weights, counts = head.launch(*texts_of([2, 3]))()
    assert (len(entries), len(weights), counts) == (0, 0, [0, 0])


@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize("tokens", [1, 2, 7, 1000])
def test_chunks_change_nothing_and_bound_the_logits(tokens, strategy):
    hidden, segments, ids = texts_of(SOME_LENGTHS[3])
    expected = splade(strategy, logits=10**6).read(hidden, segments, ids)
    head, seen = splade(strategy, logits=tokens * VOCABULARY), []
    head.vocabulary.register_forward_hook(lambda module, inputs, logits: seen.append(logits.numel()))
    assert same(head.read(hidden, segments, ids), expected)
    assert sum(seen) == segments.total * VOCABULARY  # each token once
    assert max(seen) <= tokens * VOCABULARY


# --- Long texts reduced in parts, as on a GPU: the same numbers, of each text whatever its batch, without a wait ------


REDUCING = ("mean", "max", "mean_sqrt_len", "weightedmean")
LENGTHS = (
    [1],
    [127],
    [128],
    [129],
    [256, 257],
    [1, 128, 5, 300, 129, 1],
    [5000, 3, 640],
    [1] * 50,
)


def segment_reduce(rows: torch.Tensor, how: str, lengths: torch.Tensor) -> torch.Tensor:
    return torch.segment_reduce(rows, how, lengths=lengths, axis=0, unsafe=True)


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but for a CPU's tensors."""

    def reduced(rows: torch.Tensor, how: str, segments: Segments) -> torch.Tensor:
        if segments.max_seqlen > methods._PART:
            return methods._reduced_in_parts(rows, how, segments)
        return segment_reduce(rows, how, methods._lengths(segments))

    monkeypatch.setattr(methods, "_reduced", reduced)


def row(lengths: list[int], seed: int = 1) -> torch.Tensor:
    return torch.randn(sum(lengths), 6, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("skips", [False, True], ids=["all", "skip"])
@pytest.mark.parametrize("mode", REDUCING)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}x{max(lengths)}")
def test_parts_change_nothing(lengths, mode, skips, request):
    skip = torch.tensor([min(2, length - 1) for length in lengths], dtype=torch.int32) if skips else None
    hidden, segments = row(lengths), Segments.of(lengths)
    expected = METHODS[mode](hidden.double(), segments, skip)  # more exact than either
    request.getfixturevalue("in_parts")
    found = METHODS[mode](hidden, segments, skip)
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=2e-6)
    if mode == "max":
        assert torch.equal(found.double(), expected)


@pytest.mark.parametrize("mode", REDUCING)
def test_a_text_is_the_same_to_the_bit_in_every_batch(mode, in_parts):
    lengths = [1, 128, 5, 300, 129, 64, 2000]
    hidden = row(lengths)
    together = METHODS[mode](hidden, Segments.of(lengths), None)
    for i, states in enumerate(hidden.split(lengths)):
        alone = METHODS[mode](states.contiguous(), Segments.of([lengths[i]]), None)
        assert torch.equal(alone[0], together[i])


@pytest.mark.parametrize("how", ["sum", "max"])
def test_empty_segments_after_the_texts_do_no_harm(how):
    """As in a captured graph: fewer texts than the shape has room for, and a longest one that is only a bound."""
    hidden = row([300, 20, 80])
    ends = torch.tensor([0, 300, 320, 400, 400, 400], dtype=torch.int32)
    found = methods._reduced_in_parts(hidden, how, Fixed(cu_seqlens=ends, max_seqlen=512, total=400))
    expected = segment_reduce(hidden, how, torch.tensor([300, 20, 80], dtype=torch.int32))
    torch.testing.assert_close(found[:3], expected)
    assert found.shape == (5, 6)


def test_nothing_waits_for_the_device():
    hidden = row([300, 20])
    with Waits() as waits:
        methods._reduced_in_parts(hidden, "sum", Segments.of([300, 20]))
    assert waits.seen == []


def test_an_index_of_columns_is_copied_to_the_device_once():
    pooling = Pooling(modes=("cls",), include_prompt=True)
    pooler = Pooler(pooling, token_heads=(), heads=(), device=torch.device("cpu"))
    first = pooler.columns_of((3, 1), torch.device("cpu"))
    assert first.tolist() == [3, 1] and first.dtype is torch.int64
    assert pooler.columns_of((3, 1), torch.device("cpu")) is first
    for i in range(100):  # callers choose the columns: not all are kept
        pooler.columns_of((i,), torch.device("cpu"))
    assert len(pooler._columns) == 64
