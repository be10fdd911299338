"""Large texts take turns, small ones never wait for them, and memory goes back to the system; arenas of threads."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotDone
from contextlib import ExitStack

import pytest
from tests.tiny import SENTENCES, write_checkpoint

from millpond import AsyncEngine, Engine, Pair, PoolingParams, SpannedText, TokenIds
from millpond.engine.tokenize import large_texts
from millpond.engine.tokenize.large_texts import LARGE_CHARACTERS, SLOTS, TURNS, is_large, turn
from millpond.support.heap import Heap

LARGE = "池" * (LARGE_CHARACTERS + 1)


WAIT = 60.0


TRIM = """
import ctypes, sys, time
from millpond.engine.tokenize import large_texts

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
blocks = [libc.malloc(20_000) for _ in range(10_000)]
for block in blocks:
    ctypes.memset(block, 1, 20_000)
for block in blocks[:-1]:  # the last one keeps glibc from giving back what is below it
    libc.free(block)
kept = resident()
with large_texts.turn(["w" * (large_texts.LARGE_CHARACTERS + 1 if sys.argv[1] == "large" else 1)]):
    pass
deadline = time.monotonic() + 30
while sys.argv[1] == "large" and resident() > kept - 150 and time.monotonic() < deadline:
    time.sleep(0.05)
time.sleep(0 if sys.argv[1] == "large" else 1.5)
print(kept - resident())
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with Engine(write_checkpoint(tmp_path_factory.mktemp("large") / "model"), dtype="float32") as engine:
        yield engine


@pytest.fixture
def taken():
    """Every turn is taken by someone else."""
    with ExitStack() as turns:
        for _ in range(SLOTS):
            turns.enter_context(TURNS.turn(SLOTS))
        yield turns.close


def enter(texts):
    with turn(texts):
        return True


def test_a_large_text_waits_for_its_turn_and_a_small_one_does_not(taken):
    with ThreadPoolExecutor(2) as threads:
        large = threads.submit(enter, ["a", LARGE])
        assert threads.submit(enter, ["a" * LARGE_CHARACTERS] * 9).result(WAIT)
        with pytest.raises(NotDone):
            large.result(0.05)
        taken()
        assert large.result(WAIT)


def test_what_a_prompt_or_a_template_may_make_large_is_large():
    half = LARGE[: LARGE_CHARACTERS // 2 + 1]
    assert all(map(is_large, [LARGE, half, Pair("a", half), Pair(half[1:], "ab"), SpannedText(half, ((0, 1),))]))
    assert not any(map(is_large, [half[1:], Pair("a", "b"), SpannedText("a", ((0, 1),)), TokenIds((1,) * 200_000)]))


@pytest.mark.parametrize("count", [1, 40])
def test_small_calls_are_answered_while_large_ones_wait(engine, taken, count):
    expected = engine.embed(SENTENCES[:4]).embeddings
    whole = PoolingParams(prompt="Find it: ", truncate="start")  # all of the text is needed
    large = [engine.submit("embed", [LARGE], whole) for _ in range(4)]
    small = [engine.submit("embed", SENTENCES[:4] * count) for _ in range(30)]
    for future in small:
        assert future.result(WAIT).embeddings[:4] == pytest.approx(expected, abs=1e-5)
    assert not any(future.done() for future in large)
    for future in large[1:]:
        future.cancel()
    taken()
    assert large[0].result(WAIT).truncated.all()


@pytest.mark.parametrize("options", [{}, {"long_texts": "mean"}])
def test_small_coroutines_end_while_large_ones_wait(engine, taken, options):
    async def run():
        shared = AsyncEngine(engine)
        large = [asyncio.create_task(shared.embed([LARGE[:-9] + " pond pond"], **options)) for _ in range(40)]
        await asyncio.sleep(0)  # all of them begin
        try:
            for _ in range(3):
                await asyncio.wait_for(shared.embed(SENTENCES[:3], **options), WAIT)
            assert not any(task.done() for task in large)
        finally:
            for task in large[1:]:
                task.cancel()
            taken()
        await asyncio.wait(large, timeout=4 * WAIT)
        assert large[0].result().embeddings.shape[0] == 1

    asyncio.run(run())


def test_the_memory_of_large_texts_is_given_back_once_for_all_of_a_moment(monkeypatch):
    trimmed, at_once = threading.Event(), []
    monkeypatch.setattr(threading, "Timer", lambda seconds, call: at_once.append((seconds, call)) or _Timer())
    heap = Heap(trimmed.set)
    monkeypatch.setattr(large_texts, "HEAP", heap)
    for texts in ([LARGE], [LARGE], ["small"]):
        enter(texts)
    ((seconds, trim),) = at_once
    assert seconds <= 1.0 and not trimmed.is_set()
    trim()
    assert trimmed.is_set()
    enter(["small"])
    assert len(at_once) == 1
    enter([LARGE])
    assert len(at_once) == 2


class _Timer:
    daemon = False

    def start(self):
        assert self.daemon  # or it would keep a program alive

    def is_alive(self):
        return True


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize(("size", "least", "most"), [("large", 150, 400), ("small", -50, 50)])
def test_free_memory_goes_back_to_the_system_after_a_large_text(size, least, most):
    run = subprocess.run([sys.executable, "-c", TRIM, size], capture_output=True, text=True, check=True)
    assert least <= int(run.stdout) <= most


CODE = """
import ctypes, json, sys, tempfile, threading
from xml.etree import ElementTree
from millpond.support import heap

done = heap.limit_arenas() if sys.argv[1] == "limited" else None
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
together = threading.Barrier(8)

def take():
    together.wait()
    for _ in range(200):
        libc.malloc(1000)
    together.wait()

threads = [threading.Thread(target=take) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc.fopen.restype = ctypes.c_void_p
with tempfile.NamedTemporaryFile() as file:
    stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    print(json.dumps([done, len(ElementTree.parse(file.name).findall("heap"))]))
"""


def count_arenas(setting, **environment):
    run = subprocess.run(
        [sys.executable, "-c", CODE, setting],
        env={**{k: v for k, v in os.environ.items() if k != "MALLOC_ARENA_MAX"}, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(run.stdout)


@pytest.mark.contract
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_threads_share_two_arenas():
    assert count_arenas("default")[1] > 2
    assert count_arenas("limited") == [True, 2]


@pytest.mark.contract
def test_the_environment_takes_precedence():
    assert count_arenas("limited", MALLOC_ARENA_MAX="3")[0] is False
