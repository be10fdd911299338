"""pytest settings for all seven packages: real data, no internet, and the distribution of tests to worker processes."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
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


DURATIONS = Path(__file__).parent / "tests" / "durations.json"  # written by `make durations`


def _paths(text: str) -> frozenset[PurePosixPath]:
    return frozenset(PurePosixPath("tests", path) for path in text.split())


# Files that measure time, count cores or threads, or fill memory. A single worker runs them, one after the other.
SERIAL = _paths(
    """
        server/fuzz/test_fuzz_sockets.py
        server/fuzz/test_fuzz_storm.py
        server/telemetry/test_metrics.py
    """
)
# Rings. Fast tests are neither here nor marked: no process, no compiler, no database, one real model.
# Folders of the second ring, whose tests are marked `contract`. `make test` imports neither them nor files that mark
# all of their tests.
MARKED = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.(contract|slow)\b", re.MULTILINE)
CONTRACT = _paths("chains docs engine/execute/cuda faults house server/fuzz")


def _path(nodeid: str) -> PurePosixPath:
    return PurePosixPath(nodeid.partition("::")[0])


def _is_contract(path: PurePosixPath) -> bool:
    return not CONTRACT.isdisjoint((path, *path.parents))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import folders and files of the second ring if all their tests would be deselected."""
    if "not contract" not in config.option.markexpr or not collection_path.is_relative_to(config.rootpath):
        return None
    if _is_contract(PurePosixPath(collection_path.relative_to(config.rootpath).as_posix())):
        return True
    return (
        collection_path.suffix == ".py" and bool(MARKED.search(collection_path.read_text(encoding="utf-8")))
    ) or None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the second ring by its folders, and allow the internet to tests marked ``network`` only."""
    if _is_contract(_path(item.nodeid)):
        item.add_marker("contract")
    if item.get_closest_marker("network"):
        item.add_marker("enable_socket")


@pytest.hookimpl(trylast=True)  # after pytest-randomly
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first, so that no worker starts one at the end."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        seconds = json.loads(DURATIONS.read_text(encoding="utf-8")) if DURATIONS.is_file() else {}
        items.sort(key=lambda item: -seconds.get(str(_path(item.nodeid)), 0.0))


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
