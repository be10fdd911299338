"""Memory of packed weights and workspaces: zeroed, on a boundary of 2 MiB, and a process's own."""

import multiprocessing
import os

import numpy as np
import pytest

from millpond.models.native.memory import Memory


@pytest.mark.parametrize("size", [1, 4096, (2 << 20) + 3])
def test_it_is_zeroed_and_aligned(size):
    memory = Memory(size)
    assert memory.size == len(memory.bytes) == size
    assert memory.address % (2 << 20) == 0
    assert not memory.bytes.any()


def test_it_outlives_its_name_while_an_array_reads_it():
    rows = Memory(64).bytes
    rows[:] = 7
    Memory(64).bytes[:] = 9
    assert (rows == 7).all()


def test_more_than_there_is_is_a_memory_error():
    with pytest.raises(MemoryError, match="no memory for"):
        Memory(1 << 60)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_writes_into_its_own_copy():
    """Else two processes would compute in one workspace."""
    memory = Memory(8192)
    memory.bytes[:] = 3
    context = multiprocessing.get_context("fork")
    seen, done = context.Pipe(duplex=False)

    def write():
        before = memory.bytes.copy()
        memory.bytes[:] = 5
        done.send((int(before.min()), int(before.max()), int(memory.bytes.min())))

    child = context.Process(target=write)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert seen.recv() == (3, 3, 5)
    assert np.array_equal(memory.bytes, np.full(8192, 3, dtype=np.uint8))
