"""pytest settings for all seven packages: real data, no internet, and the distribution of tests to worker processes."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.ingest.postgres import PostgresServer

pytest.register_assert_rewrite("tests.late_interaction.index_contract")
pytest_plugins = ("tests.engines",)

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is imported
if "PYTEST_XDIST_WORKER" in os.environ:
    # One thread for each worker. Otherwise torch and OpenMP start one thread per core in every worker, and these wait
    # for each other at every operator. Read when torch is imported; child processes inherit it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def _paths(text: str) -> frozenset[PurePosixPath]:
    return frozenset(PurePosixPath("tests", path) for path in text.split())


# Files that measure time, count cores or threads, or fill memory. A single worker runs them, one after the other.
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
# Files that take ten seconds or more. They run first, so that no worker starts one at the end.
LONG = _paths(
    """
        chains/test_chains.py
        cli/test_demo.py
        cli/test_search_command.py
        compat/test_migrate.py
        engine/test_engine.py
        house/test_notebooks.py
        ingest/test_ingest_contract.py
        late_interaction/test_exact_kernels.py
        models/test_compiled.py
        native/test_kernel_table.py
        parity/test_backbones.py
        server/launch/test_serve_command.py
    """
)


def _path(nodeid: str) -> PurePosixPath:
    return PurePosixPath(nodeid.partition("::")[0])


@pytest.hookimpl(trylast=True)  # after pytest-randomly
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Allow the internet to tests marked ``network`` only (pytest-socket stops all others); put slow files first."""
    for item in items:
        if item.get_closest_marker("network"):
            item.add_marker("enable_socket")
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: _path(item.nodeid) not in SERIAL | LONG)


def pytest_runtest_setup() -> None:
    """Undo the log levels that a command set which an earlier test ran in this process."""
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("millpond").setLevel(logging.NOTSET)


def pytest_collection_finish() -> None:
    """Freeze the objects that imports created: otherwise every full garbage collection scans millions of them."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run all tests of a file in the same worker, so that fixtures are created once, and all serial files in one."""
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
    """The folder of BEIR-format data sets, from ``MILLPOND_DATA``."""
    folder = os.environ.get("MILLPOND_DATA")
    if not folder:
        pytest.skip("MILLPOND_DATA is not set; it names a folder of BEIR-format sets")
    path = Path(folder)
    assert path.is_dir(), f"MILLPOND_DATA={folder!r} is not a folder"
    return path


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL with pgvector, started by the first test that asks for it."""
    from tests.ingest.postgres import running_server

    with running_server() as server:
        yield server
