"""Which precision the encoder takes on a processor, and the memory of packed weights and workspaces."""

from __future__ import annotations

import ctypes
import multiprocessing
import os

import numpy as np
import pytest

from millpond.backends.native import backend
from millpond.backends.native.memory import Memory
from millpond.native import library, precision
from millpond.values.config import EngineConfig

# --- Which precision the encoder takes on a processor, and which kernels serve it -------------------------------------


built = pytest.mark.skipif(library.kernel_table() is None, reason="no compiled kernels: no C++ compiler, or no AVX2")


@pytest.fixture
def processor(monkeypatch):
    """Pretends a processor: its highest instruction set and its speeds."""

    def pretend(isa, **speeds):
        monkeypatch.setattr(library, "isa", lambda: isa)
        monkeypatch.setattr(library, "kernel_table", lambda: None if isa is None else library.KernelTable())
        monkeypatch.setattr(library, "absent", lambda: "not built")
        monkeypatch.setattr(precision, "operations_per_second", lambda: speeds)

    return pretend


def chosen(dtype):
    return backend._precision(EngineConfig(model="model", dtype=dtype))


@pytest.mark.parametrize(
    ("isa", "speeds", "expected", "line"),
    [
        pytest.param(
            "avx512bf16",
            {"float32": 1e11, "bfloat16": 2e11},
            "bfloat16",
            "avx512bf16 in bfloat16 (vdpbf16ps does 2.0 x the operations of float32, measured), avx512 in float32",
            id="dot-products-twice-as-fast",
        ),
        pytest.param(
            "avx512bf16",
            {"float32": 2e11, "bfloat16": 1e11},
            "float32",
            "avx512 in float32 (vdpbf16ps does 0.5 x the operations of float32, measured: avx512bf16 only where "
            "bfloat16 is asked for)",
            id="dot-products-at-a-quarter",
        ),
        pytest.param(
            "avx512bf16",
            {"float32": 1e11, "bfloat16": 1.1e11},
            "float32",
            "avx512 in float32 (vdpbf16ps does 1.1 x",
            id="a-gain-too-small",
        ),
        pytest.param(
            "amx",
            {"float32": 2e11, "bfloat16": 1e11},
            "bfloat16",
            "amx in bfloat16 (tiles), avx512 in float32",
            id="tiles",
        ),
        pytest.param(
            "avx512", {"float32": 1e11}, "float32", "avx512 in float32 (no dot products of bfloat16)", id="avx512"
        ),
        pytest.param("avx2", {"float32": 1e11}, "float32", "avx2 in float32 (no dot products of bfloat16)", id="avx2"),
        pytest.param(
            "bf16",
            {"float32": 1e11, "bfloat16": 4e11},
            "bfloat16",
            "bf16 in bfloat16 (bfmmla does 4.0 x the operations of float32, measured), neon in float32",
            id="arm-twice-two-by-two",
        ),
        pytest.param(
            "dotprod", {"float32": 1e11}, "float32", "neon in float32 (no dot products of bfloat16)", id="arm-dotprod"
        ),
    ],
)
def test_the_faster_precision_is_taken_and_env_says_why(processor, isa, speeds, expected, line):
    processor(isa, **speeds)
    assert chosen("auto") == expected
    assert chosen("bfloat16") == "bfloat16"
    assert precision.served_by().startswith(line)


@built
def test_what_the_processor_has_is_measured_once(monkeypatch):
    table = library.kernel_table()
    calls = []
    for name in ("float32", "bfloat16"):
        if kernel := getattr(table, f"measure_{name}"):
            call = precision.SpeedCall(rounds=100)
            assert kernel(ctypes.addressof(call)) == 0
            assert call.seconds > 0
            assert call.operations > 100 * 12 * 2 * 8 - 1
    precision.operations_per_second.cache_clear()
    measured = precision._fastest
    monkeypatch.setattr(precision, "_fastest", lambda kernels: calls.append(kernels) or measured(kernels))
    speeds = precision.operations_per_second()
    assert precision.operations_per_second() is speeds
    assert len(calls) == 1
    expected = {"float32", "bfloat16"} if library.isa() in ("avx512bf16", "amx") else {"float32"}
    assert set(speeds) == expected
    assert min(speeds.values()) > 1e6


def test_the_shortest_run_counts():
    """Others use the processor for a while: the longer runs say nothing."""
    seconds = {"float32": iter([9.0, 1.0] * 20), "bfloat16": iter([0.5, 7.0] * 20)}

    def kernel(name):
        def measure(address):
            call = precision.SpeedCall.from_address(address)
            call.seconds, call.operations = next(seconds[name]), 10.0

        return measure

    assert precision._fastest({name: kernel(name) for name in seconds}) == {"float32": 10.0, "bfloat16": 20.0}


# --- Memory of packed weights and workspaces: zeroed, on a boundary of 2 MiB, and a process's own ---------------------


@pytest.mark.parametrize("size", [1, 4096, (2 << 20) + 3])
def test_it_is_zeroed_and_aligned(size):
    memory = Memory(size)
    assert memory.size == len(memory.bytes) == size
    assert memory.address % (2 << 20) == 0
    assert not memory.bytes.any()


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
