"""One engine for each configuration of a process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from millpond import VectorCache
from millpond.engine import shared as sharing
from millpond.engine.shared import close_shared, get_engine, get_engine_async
from millpond.errors import EngineClosedError, ModelLoadError


@pytest.fixture
def folder(minilm_folder: Path) -> str:
    return str(minilm_folder)


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_shared()


def test_equal_configurations_share_an_engine(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = get_engine(folder)
    (tmp_path / "alias").symlink_to(folder)
    monkeypatch.chdir(Path(folder).parent)
    spellings: list[tuple[Any, dict[str, Any]]] = [
        (folder, {}),
        (folder + "/", {}),
        (Path(folder), {}),
        (Path(folder).name, {}),
        (tmp_path / "alias", {}),
        (folder, {"device": engine.device}),
        (folder, {"dtype": "auto", "revision": None}),
        (folder, {"hf_overrides": {}}),
    ]
    assert [get_engine(model, **options) is engine for model, options in spellings] == [True] * len(spellings)


def test_a_cache_is_part_of_the_configuration(folder: str, tmp_path: Path) -> None:
    cached = get_engine(folder, cache=tmp_path / "vectors.db")
    assert get_engine(folder, cache=f"{tmp_path}/./vectors.db") is cached
    assert get_engine(folder) is not cached
    with VectorCache(tmp_path / "vectors.db") as cache:
        assert get_engine(folder, cache=cache).cache is cache
        close_shared()


def test_callers_that_come_together_wait_for_one_load(folder: str) -> None:
    together = threading.Barrier(8)

    def ask(i: int) -> object:
        together.wait()
        return get_engine(folder, device=("auto", "cpu")[i % 2])

    with ThreadPoolExecutor(8) as pool:
        engines = set(pool.map(ask, range(8)))
    on_cpu = get_engine(folder, device="cpu")
    assert engines == {get_engine(folder), on_cpu}
    assert len(engines) == (1 if get_engine(folder).device == "cpu" else 2)


def test_a_closed_engine_is_replaced(folder: str) -> None:
    first = get_engine(folder)
    first.close()
    second = get_engine(folder)
    assert second is not first
    assert second.embed(["tides"]).embeddings.shape == (1, 384)


def test_close_shared(folder: str) -> None:
    engines = [get_engine(folder), get_engine(folder, max_length=8)]
    close_shared()
    for engine in engines:
        with pytest.raises(EngineClosedError):
            engine.embed(["tides"])
    assert get_engine(folder) not in engines


async def test_a_failed_load_reaches_everyone_who_waits(tmp_path: Path) -> None:
    results = await asyncio.gather(*(get_engine_async(tmp_path) for _ in range(3)), return_exceptions=True)
    assert [type(result) for result in results] == [ModelLoadError] * 3


async def test_an_event_loop_goes_on_while_an_engine_loads(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load, turned = sharing._engine, threading.Event()

    def held(*args: object) -> object:
        assert turned.wait(timeout=60), "the event loop is blocked"
        return load(*args)

    monkeypatch.setattr(sharing, "_engine", held)
    tasks = [asyncio.ensure_future(get_engine_async(folder)) for _ in range(3)]
    for _ in range(5):
        await asyncio.sleep(0.001)
    assert not any(task.done() for task in tasks)
    turned.set()
    await asyncio.gather(*tasks)
    assert {task.result() for task in tasks} == {get_engine(folder)}


async def test_who_is_cancelled_does_not_cancel_the_others(folder: str) -> None:
    first, second = (asyncio.ensure_future(get_engine_async(folder)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).spec.dimensions == 384
    with pytest.raises(asyncio.CancelledError):
        await first


_FORK = """
import os, sys
from millpond.engine import shared as module
from millpond.errors import EngineClosedError

engine = module.get_engine(sys.argv[1])
expected = engine.embed(["tides"]).embeddings
held = module._lock
held.acquire()  # as if another thread were inside
child = os.fork()
if child == 0:
    try:
        engine.embed(["tides"])
        os._exit(1)
    except EngineClosedError:
        pass
    mine = module.get_engine(sys.argv[1])
    same = mine is engine or abs(mine.embed(["tides"]).embeddings - expected).max() > 1e-6
    module.close_shared()
    os._exit(2 if same else 0)
held.release()
assert os.waitpid(child, 0)[1] == 0, "the child failed"
assert module.get_engine(sys.argv[1]) is engine
assert (engine.embed(["tides"]).embeddings == expected).all()
"""


@pytest.mark.contract
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_loads_its_own(folder: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FORK, folder], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
