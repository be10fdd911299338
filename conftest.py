"""For the tests of all five packages: the real data, no internet, and who runs what where two processes share them."""

from __future__ import annotations

import gc
import os
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is imported
if "PYTEST_XDIST_WORKER" in os.environ:
    # One core for each worker. torch's and OpenMP's threads would otherwise be as many in each as there are cores, and
    # wait for each other at every operator. Read when torch is imported; processes that tests start inherit it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def _paths(text: str) -> frozenset[PurePosixPath]:
    return frozenset(PurePosixPath("tests", path) for path in text.split())


# Files that measure time, count cores or threads, or fill memory. One worker runs them, one after the other.
SERIAL = _paths(
    """
        engine/execute/test_cores.py
        engine/execute/test_lanes.py
        engine/execute/test_threads.py
        engine/execute/test_worker.py
        engine/execute/cuda/test_overlapping_worker.py
        engine/schedule/test_scheduler.py
        engine/test_callbacks.py
        engine/test_crowd.py
        engine/test_devices.py
        engine/test_memory.py
        engine/test_stats.py
        server/fuzz/test_fuzz_sockets.py
        server/fuzz/test_fuzz_storm.py
        server/telemetry/test_metrics.py
    """
)
# Files of ten seconds and more. They go first, so that no worker is left with one of them at the end.
LONG = _paths(
    """
        cli/test_demo.py
        engine/test_engine.py
        ingest/test_ingest_contract.py
        models/test_compiled.py
        parity/test_backbones.py
        server/launch/test_serve_command.py
    """
)


def _path(nodeid: str) -> PurePosixPath:
    return PurePosixPath(nodeid.partition("::")[0])


@pytest.hookimpl(trylast=True)  # after pytest-randomly
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked ``network`` may leave this machine; everything else is stopped by pytest-socket."""
    for item in items:
        if item.get_closest_marker("network"):
            item.add_marker("enable_socket")
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: _path(item.nodeid) not in SERIAL | LONG)


def pytest_collection_finish() -> None:
    """What the imports made stays: without it each full garbage collection looks through some millions of objects."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep the tests of a file in one worker, so that its fixtures are made once, and the serial files together."""
    from xdist.scheduler import LoadScopeScheduling

    missing = [str(path) for path in SERIAL | LONG if not (config.rootpath / path).is_file()]
    if missing:
        raise pytest.UsageError(f"conftest.py names files that do not exist: {', '.join(sorted(missing))}")
    config.option.loadscopereorder = False  # the order stays random

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = _path(nodeid)
            return "serial" if path in SERIAL else str(path)

    return ByFile(config, log)


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of BEIR-format sets that ``MILLPOND_DATA`` names."""
    folder = os.environ.get("MILLPOND_DATA")
    if not folder:
        pytest.skip("MILLPOND_DATA is not set; it names a folder of BEIR-format sets")
    path = Path(folder)
    assert path.is_dir(), f"MILLPOND_DATA={folder!r} is not a folder"
    return path
