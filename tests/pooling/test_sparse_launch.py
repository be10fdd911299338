"""Sparse weights as a GPU computes them: nothing waits before the batch has run, and the weights are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from millpond.attention.segments import Segments
from millpond.pooling import sparse
from millpond.pooling.masked_lm import MaskedLanguageHead
from millpond.pooling.sparse import SpladeHead, TokenWeightHead

WIDTH, VOCABULARY = 8, 50
LENGTHS = ([1], [5], [1, 1, 1], [3, 17, 1, 8, 40, 2], [64, 1, 1, 64])
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


def row(lengths: Sequence[int], seed: int = 0) -> tuple[torch.Tensor, Segments, torch.Tensor]:
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


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
@pytest.mark.parametrize("strategy", ["max", "sum"])
def test_all_texts_at_once_have_the_weights_of_one_by_one(strategy, activation, lengths):
    head = splade(strategy, activation)
    hidden, segments, ids = row(lengths)
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
    hidden, segments, ids = row(lengths)
    entries, weights, counts = head.launch(hidden, segments, ids)()
    parts = zip(hidden.split(lengths), entries.split(counts), weights.split(counts), ids.split(lengths), strict=True)
    for states, own, values, tokens in parts:
        assert same(head.launch(states, Segments.of([len(tokens)]), tokens)(), (own, values, [len(own)]))


@pytest.mark.parametrize("strategy", ["max", "sum"])
def test_half_precision_is_near(strategy):
    head = splade(strategy)
    hidden, segments, ids = row(LENGTHS[3])
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
    hidden, segments, ids = row(LENGTHS[3])
    for states in (hidden, hidden.bfloat16()):
        assert same(head.launch(states, segments, ids)(), head.read(states, segments, ids))


@pytest.mark.parametrize("head", [splade("max"), splade("sum"), token_weights()], ids=["max", "sum", "tokens"])
def test_only_the_returned_function_waits(head):
    hidden, segments, ids = row(LENGTHS[3])
    with Waits() as launching:
        finish = head.launch(hidden, segments, ids)
    assert launching.seen == []
    with Waits() as finishing:
        finish()
    assert finishing.seen  # the negative control: it would have been noticed


def test_token_weights_read_in_two_steps_are_the_same():
    head = token_weights()
    for lengths in LENGTHS:
        assert same(head.launch(*row(lengths))(), head.read(*row(lengths)), 0.0)


def test_a_weight_that_is_no_number_is_not_hidden():
    head = splade()
    hidden, segments, ids = row([2, 3])
    hidden[1] = float("nan")
    _, weights, counts = head.launch(hidden, segments, ids)()
    assert weights[: counts[0]].isnan().all() and counts[0] == VOCABULARY
    assert weights[counts[0] :].isfinite().all()


def test_a_text_without_weights_has_none():
    head = splade()
    head.vocabulary.decoder_bias.fill_(-1000.0)
    entries, weights, counts = head.launch(*row([2, 3]))()
    assert (len(entries), len(weights), counts) == (0, 0, [0, 0])
