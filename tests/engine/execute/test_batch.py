"""Batches: arrays on the host for a native forward, and tensors of the same numbers for one in torch."""

import numpy as np
import pytest
import torch

from millpond.engine.execute.batch import DeviceBatch
from millpond.engine.input.plan import Plan
from millpond.engine.output.assemble import assemble
from millpond.engine.schedule.call import Call
from millpond.engine.schedule.request import Prefix, Request
from millpond.pooling.pooler import OutputSpec

PLAN = Plan(task="embed", output=OutputSpec(kind="pooled"), limit=512, truncate="end", width=4, skip=2, adapter=1)


def batch_of(fields, *, rounded=False, plan=PLAN):
    call = Call([str(i) for i in range(len(fields))], plan, assemble=assemble, native_width=4)
    requests = [Request(call=call, slot=i, **each) for i, each in enumerate(fields)]
    return DeviceBatch.pack(requests, position_offset=2, device=torch.device("cpu"), rounded=rounded)


def ids(*tokens):
    return np.array(tokens, dtype=np.int32)


TYPED = [
    {"ids": ids(5, 6, 7), "types": np.array([0, 1, 1], dtype=np.int8)},
    {"ids": ids(8)},
    {"ids": ids(9, 10, 11, 12), "attended": 3},
]


@pytest.mark.parametrize("rounded", [False, True])
def test_the_arrays_are_int32_and_contiguous(rounded):
    packed = batch_of([*TYPED, {"ids": np.arange(70, dtype=np.int32)}], rounded=rounded).packed
    for array in (packed.ids, packed.bounds, packed.lengths, packed.positions, packed.types, packed.adapters):
        assert array.dtype == np.int32 and array.flags.c_contiguous
    assert packed.bounds.tolist()[:5] == [0, 1, 4, 8, 78]
    assert np.diff(packed.bounds).tolist() == packed.lengths.tolist()
    assert packed.bounds[-1] == len(packed.ids) == (96 if rounded else 78)


def test_the_tensors_have_the_numbers_of_the_arrays():
    batch = batch_of(TYPED)
    assert [request.slot for request in batch.requests] == [1, 0, 2] and batch.lead == 0
    assert batch.input_ids.tolist() == [[8, 5, 6, 7, 9, 10, 11, 12]]
    assert batch.position_ids.tolist() == [[2, 2, 3, 4, 2, 3, 4, 5]]
    assert batch.token_types is not None and batch.token_types.tolist() == [[0, 0, 1, 1, 0, 0, 0, 0]]
    assert batch.adapter_ids is not None and batch.adapter_ids.tolist() == [[1] * 8]
    assert batch.skip is not None and batch.skip.tolist() == [0, 2, 2]  # a text keeps a token to pool
    tensors = (batch.input_ids, batch.position_ids, batch.token_types, batch.adapter_ids)
    assert [tensor.dtype for tensor in tensors] == [torch.int64] * 4 and batch.skip.dtype == torch.int32
    assert batch.segments.cu_seqlens.tolist() == batch.packed.bounds.tolist()
    assert batch.segments.keys == (1, 3, 3) and batch.segments.seqused_k is not None


def test_positions_go_on_after_a_shared_prefix():
    prefix = Prefix(length=2)
    fields = [{"ids": ids(1, 2, 3), "prefix": prefix}, {"ids": ids(1, 2, 4, 5), "prefix": prefix}, {"ids": ids(7, 8)}]
    packed = batch_of(fields, plan=Plan(task="score", output=PLAN.output, limit=9, truncate="end", width=1)).packed
    assert packed.lead == 1 and packed.prefixes == [-1, 0, -1, 0]
    assert packed.ids.tolist() == [1, 2, 3, 7, 8, 4, 5]
    assert packed.bounds.tolist() == [0, 2, 3, 5, 7]
    assert packed.positions.tolist() == [2, 3, 4, 2, 3, 4, 5]
    assert packed.types is packed.adapters is packed.skip is packed.keys is None


def test_a_forward_that_reads_the_arrays_has_no_tensors_made():
    batch = batch_of(TYPED)
    assert batch.packed.ids.tolist() and vars(batch).keys() == {"packed", "device"}
    segments = batch.segments
    assert vars(segments).keys().isdisjoint({"cu_seqlens", "seqused_k", "runs"})
    assert batch.input_ids is batch.input_ids and segments.cu_seqlens is segments.cu_seqlens
