"""The shapes of graphs, and when they are captured: few times, and in spite of captures that fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set
from itertools import cycle, islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.recording import Recording

from millpond.backends.backend import OutputSpec, PackedBatch
from millpond.backends.torch.cuda import graphs
from millpond.backends.torch.cuda.buckets import Bucket, Buckets
from millpond.backends.torch.cuda.graphs import Graphs
from millpond.backends.torch.device_batch import ForwardInput
from millpond.backends.torch.pooling.pooler import Pooler, PoolerCall
from millpond.checkpoints.modules import Pooling
from millpond.engine.execute.packing import pack
from millpond.engine.input.plan import Plan
from millpond.engine.output.assemble import assemble
from millpond.engine.schedule.call import Call
from millpond.engine.schedule.request import Request


def fit(lengths: list[int], *, longest: int = 512) -> Bucket:
    bucket = Buckets(longest=longest).fit(lengths)
    assert bucket is not None
    return bucket


@given(st.lists(st.integers(1, 512), min_size=1, max_size=100), st.integers(0, 5000))
def test_a_bucket_holds_its_batch_and_wastes_little(lengths: list[int], room: int) -> None:
    most = max(lengths) + room
    bucket, total = fit(lengths, longest=most), sum(lengths)
    tail = bucket.tail(total)
    assert total + sum(tail) == bucket.tokens
    assert len(lengths) + len(tail) <= bucket.sequences
    assert max([*lengths, *tail]) <= bucket.longest <= most
    assert all(length > 0 for length in tail)
    wasted = bucket.tokens - total
    assert bucket.tokens == 64 or wasted / bucket.tokens < (
        1 / 3 if total <= 512 else 1 / 5 if total <= 4096 else 1 / 9
    )
    assert bucket.longest <= max(64, 2 * max(lengths) - 1)
    assert bucket.sequences <= max(4, 1.5 * (len(lengths) + len(tail)))


@pytest.mark.parametrize(
    ("lengths", "longest", "expected"),
    [
        ([1], 512, (64, 4, 64)),
        ([64], 512, (64, 4, 64)),
        ([65], 512, (96, 4, 128)),
        ([50] * 10, 512, (512, 12, 64)),
        ([513], 600, (640, 4, 600)),
        ([512] * 64, 512, (32768, 64, 512)),
        ([512] * 63 + [500], 512, (32768, 96, 512)),  # and one dummy sequence
        ([1] * 30, 8, (64, 48, 8)),  # 34 dummy tokens in five sequences of at most 8
        ([5], 5, (64, 16, 5)),
    ],
)
def test_shapes(lengths: list[int], longest: int, expected: tuple[int, int, int]) -> None:
    bucket = fit(lengths, longest=longest)
    assert (bucket.tokens, bucket.sequences, bucket.longest) == expected


POOLED = frozenset((OutputSpec(kind="pooled"),))


PLAN = Plan(task="embed", output=OutputSpec(kind="pooled"), limit=512, truncate="end", width=2)


class Clock:
    """Seconds that pass only when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class NumberedShapes(Buckets):
    """Shapes that differ in their number of sequences: that of the shape whose turn it is."""

    turn = 0

    def __init__(self) -> None:
        super().__init__(longest=64)

    def fit(self, lengths: Sequence[int]) -> Bucket:
        return Bucket(tokens=64, sequences=4 + self.turn, longest=64)


class TokenIds:
    """A model whose hidden states are the token ids: here it is counted what is captured, not computed."""

    def __init__(self) -> None:
        pooling = Pooling(modes=("lasttoken",), include_prompt=True)
        self._pooler = Pooler(pooling, token_heads=(), heads=(), device=torch.device("cpu"))

    def states(self, batch: ForwardInput) -> torch.Tensor:
        return batch.input_ids[0].float()[:, None]

    def pooler_call(self, batch: ForwardInput, states: torch.Tensor) -> PoolerCall:
        return PoolerCall(self._pooler, states, segments=batch.segments, skip=batch.skip, input_ids=batch.input_ids[0])

    def call_of_rows(self, batch: ForwardInput, outputs: Set[OutputSpec]) -> None:
        return None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(graphs, "perf_counter", made)
    return made


def packed() -> PackedBatch:
    call = Call(["a"], PLAN, assemble=assemble, native_width=2)
    return pack([Request(call=call, slot=0, ids=np.full(5, 7, dtype=np.int32))], position_offset=0).batch


class Pond:
    """Graphs over a recording backend; a batch takes 50 ms of the clock, a capture 100 ms more."""

    def __init__(self, clock: Clock) -> None:
        self.backend, self.shapes, self.clock = Recording(), NumberedShapes(), clock
        self.graphs = Graphs(TokenIds(), self.backend, self.shapes)
        self.refused: Callable[[int], Exception | None] = lambda turn: None
        self.backend.refuse = self._refuse
        self.attempts: list[int] = []
        self._packed = packed()

    def _refuse(self) -> None:
        self.clock.now += 0.1
        self.attempts.append(self.shapes.turn)
        error = self.refused(self.shapes.turn)
        if error is not None:
            raise error

    @torch.inference_mode()
    def run(self, turn: int) -> bool:
        """One batch of a shape; returns whether a graph ran it."""
        self.clock.now += 0.05
        self.shapes.turn = turn
        rows = self.graphs.run(self._packed, POOLED)
        if rows is None:
            return False
        assert rows.rows[OutputSpec(kind="pooled")].tolist() == [[7]]
        return True


@pytest.fixture
def pond(clock: Clock) -> Pond:
    return Pond(clock)


def test_two_hundred_shapes_are_captured_few_times(pond: Pond) -> None:
    for turn in islice(cycle(range(200)), 200 * 10):
        pond.run(turn)
    # One for nearly every batch, if nothing bounds them.
    assert len(pond.attempts) == len(pond.graphs.shapes) == 64


def test_captures_are_a_small_part_of_the_time(pond: Pond) -> None:
    for turn in islice(cycle(range(200)), 200 * 20):
        pond.run(turn)
    assert len(pond.attempts) > 64  # graphs still change hands, as shapes may go out of use
    assert 0.1 * (len(pond.attempts) - 1) <= 0.05 * pond.clock.now
    assert len(pond.graphs.shapes) == 64


def test_a_shape_that_is_always_used_keeps_its_graph(pond: Pond) -> None:
    ran = [pond.run(turn) for other in islice(cycle(range(1, 200)), 200 * 8) for turn in (0, other)]
    assert ran[:3:2] == [False, True] and all(ran[2::2])
    assert pond.attempts.count(0) == 1


def test_an_idle_hour_pays_for_no_captures(pond: Pond) -> None:
    for turn in [*range(200)] * 2:
        pond.run(turn)
    assert len(pond.attempts) == 64
    pond.clock.now += 3600
    for turn in [*range(200)] * 2:
        pond.run(turn)
    assert len(pond.attempts) == 64


def test_shapes_without_a_graph_are_not_remembered_for_ever(pond: Pond) -> None:
    for turn in range(3000):
        pond.run(turn)
    assert pond.attempts == []
    assert len(pond.graphs._seen) == 1024
    pond.run(0)  # forgotten: seen for the first time
    assert pond.attempts == []
    pond.run(2999)
    assert pond.attempts == [2999]


def refusal() -> Exception:
    return torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")


def levels(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.levelname for record in caplog.records]


def test_a_capture_that_fails_concerns_its_shape_alone(pond: Pond, caplog: pytest.LogCaptureFixture) -> None:
    pond.refused = lambda turn: refusal() if turn in (1, 3) else None
    ran = [[pond.run(turn) for turn in range(5)] for _ in range(4)]
    assert ran == [[False] * 5] + [[True, False, True, False, True]] * 3
    assert pond.attempts == [0, 1, 2, 3, 4]  # one that failed is not tried again
    assert pond.backend.forgotten == 2 and "drain" not in pond.backend.log
    assert levels(caplog) == ["WARNING"]
    assert "64 tokens" in caplog.text and "not permitted" in caplog.text


def test_after_several_failures_graphs_are_given_up(pond: Pond, caplog: pytest.LogCaptureFixture) -> None:
    pond.refused = lambda turn: refusal() if turn else None
    for _ in range(3):
        for turn in range(10):
            pond.run(turn)
    assert pond.attempts == [0, 1, 2, 3, 4]
    assert pond.graphs.shapes == () and not pond.run(0)
    given_up = [record for record in caplog.records if "given up" in record.getMessage()]
    assert [record.levelname for record in given_up] == ["WARNING"] and "4 shapes" in given_up[0].getMessage()
    assert levels(caplog) == ["WARNING", "WARNING"]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError('captures_underway.empty() INTERNAL ASSERT FAILED at "CUDACachingAllocator.cpp":3941'),
    ],
    ids=["torch", "host", "accelerator", "assertion"],
)
def test_a_capture_without_memory_gives_back_what_graphs_have(
    error: Exception, pond: Pond, caplog: pytest.LogCaptureFixture
) -> None:
    short = True
    pond.refused = lambda turn: error if turn == 1 and short else None
    assert [pond.run(turn) for turn in (0, 0, 1, 1)] == [False, True, False, False]
    assert pond.graphs.shapes == () and pond.backend.forgotten == 1
    short = False
    assert [pond.run(turn) for turn in (1, 1, 0, 0)] == [False, True, False, True]  # seen as often again
    assert levels(caplog) == []


def test_a_shape_that_never_has_memory_is_tried_less_and_less(pond: Pond) -> None:
    """Each attempt drops all graphs, and what torch reserved for it is not given back."""
    short = True
    pond.refused = lambda turn: torch.OutOfMemoryError("CUDA out of memory") if short else None
    tried = [number for number in range(1, 301) if (len(pond.attempts), pond.run(0))[0] < len(pond.attempts)]
    assert tried == [2, 4, 8, 16, 32, 64, 128, 256]
    short = False
    assert [pond.run(0) for _ in range(300)].index(True) == 211  # the 512th use
    pond.graphs.clear()
    assert [pond.run(0), pond.run(0)] == [False, True]  # as ever, once it was captured


def test_a_lost_device_is_no_failed_capture(pond: Pond, caplog: pytest.LogCaptureFixture) -> None:
    pond.refused = lambda turn: torch.AcceleratorError("CUDA error: unspecified launch failure")
    pond.run(0)
    with pytest.raises(torch.AcceleratorError, match="unspecified"):
        pond.run(0)
    assert levels(caplog) == [] and pond.backend.forgotten == 0


def test_what_reads_lengths_on_the_host_is_tried_once(pond: Pond, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pond.refused = lambda turn: graphs.HostLengthsError("the lengths are on the device")
    for turn in [*range(10)] * 3:
        assert not pond.run(turn)
    assert pond.attempts == [0]
    assert [record.levelname for record in caplog.records if "without CUDA graphs" in record.getMessage()] == ["INFO"]
