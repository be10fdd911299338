"""Long texts reduced in parts, as on a GPU: the same numbers, of each text whatever its batch, without a wait."""

from __future__ import annotations

import pytest
import torch
from tests.pooling.test_sparse_launch import Waits

from millpond.attention.segments import Fixed, Segments
from millpond.checkpoints.modules import Pooling
from millpond.pooling import methods
from millpond.pooling.methods import METHODS
from millpond.pooling.pooler import Pooler

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


def test_a_cpu_reduces_at_once(monkeypatch):
    monkeypatch.setattr(methods, "_reduced_in_parts", None)
    METHODS["mean"](row([300]), Segments.of([300]), None)


def test_an_index_of_columns_is_copied_to_the_device_once():
    pooling = Pooling(modes=("cls",), include_prompt=True)
    pooler = Pooler(pooling, token_heads=(), heads=(), device=torch.device("cpu"))
    first = pooler.columns_of((3, 1), torch.device("cpu"))
    assert first.tolist() == [3, 1] and first.dtype is torch.int64
    assert pooler.columns_of((3, 1), torch.device("cpu")) is first
    for i in range(100):  # callers choose the columns: not all are kept
        pooler.columns_of((i,), torch.device("cpu"))
    assert len(pooler._columns) == 64
