"""pytest settings for all packages: real data, no internet, and the distribution of tests to worker processes."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
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
MARKED = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.(contract|door|slow)\b", re.MULTILINE)
CONTRACT = _paths("chains docs engine/execute/cuda faults house server/fuzz")
# Files of this mark need a library of docs/doors.md, which only `make test-doors` has.
MARKED_DOOR = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.door\b", re.MULTILINE)
# Folders and files that `make test-light` leaves out: their tests need torch, as an oracle or because they test that
# backend, or Ray, a browser or another tool of development. Other files mark all of their tests as `torch`, or some.
TORCH = _paths(
    """
        attention backends compat/test_llm.py compat/test_llm_architectures.py compat/test_llm_options.py
        compat/test_migrate.py compat/test_tutorials.py docs engine/execute/cuda faults gpu house
        ingest/test_ingest_ray.py models native/test_disentangled.py native/test_families.py native/test_library.py
        native/test_packed_file.py native/test_plans.py parity pooling server/api/test_page.py
        server/fuzz/test_fuzz_schema.py server/launch/test_ray_serve.py
    """
)
MARKED_TORCH = re.compile(r"^pytestmark = (\[[^\]]*)?pytest\.mark\.torch\b", re.MULTILINE)
# Why a test of `make test-light` may be skipped; anything but these, and what a processor lacks, is a missing package.
SKIPS = re.compile(r"MILLPOND_\w+ is not set|no (kernels for \w+ on )?(amx|avxvnni)|has no bfloat16|this (sink|index) ")


def _path(nodeid: str) -> PurePosixPath:
    return PurePosixPath(nodeid.partition("::")[0])


def _is_contract(path: PurePosixPath) -> bool:
    return not CONTRACT.isdisjoint((path, *path.parents))


def _needs_torch(path: PurePosixPath) -> bool:
    return not TORCH.isdisjoint((path, *path.parents))


def _is_of_torch(item: pytest.Item) -> bool:
    return _needs_torch(_path(item.nodeid)) or item.get_closest_marker("torch") is not None


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option of `make test-light` and of `make test-torch`."""
    text = "none: the tests that need no torch, which must be absent; only: the others"
    parser.addoption("--torch", choices=("none", "only"), help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to test without torch where it can be imported."""
    if config.option.torch == "none":
        found = [name for name in ("torch", "transformers", "sentence_transformers") if find_spec(name)]
        if found:
            raise pytest.UsageError(f"--torch=none: {', '.join(found)} can be imported from {sys.prefix}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import folders and files if all their tests would be deselected: the second ring, or those of torch."""
    if not collection_path.is_relative_to(config.rootpath):
        return None
    path = PurePosixPath(collection_path.relative_to(config.rootpath).as_posix())
    rings = []
    if "not contract" in config.option.markexpr:
        rings.append((_is_contract, MARKED))
    if "not door" in config.option.markexpr:
        rings.append((lambda path: False, MARKED_DOOR))
    if config.option.torch == "none":
        rings.append((_needs_torch, MARKED_TORCH))
    text = collection_path.read_text(encoding="utf-8") if rings and path.suffix == ".py" else ""
    return any(belongs(path) or mark.search(text) for belongs, mark in rings) or None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A test that is skipped for lack of a package fails `make test-light`."""
    report = yield
    return _unless_skipped(report, item.config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """The same, of a whole file."""
    report = yield
    return _unless_skipped(report, collector.config)


def _unless_skipped(report: Any, config: pytest.Config) -> Any:
    if config.option.torch == "none" and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not SKIPS.search(reason):
            report.outcome, report.longrepr = "failed", f"make test-light runs every test: {reason}"
    return report


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the second ring by its folders, and allow the internet to tests marked ``network`` only."""
    if _is_contract(_path(item.nodeid)):
        item.add_marker("contract")
    if item.get_closest_marker("network"):
        item.add_marker("enable_socket")


@pytest.hookimpl(trylast=True)  # after pytest-randomly
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow files first, so that no worker starts one at the end; and the tests of ``--torch``."""
    if config.option.torch is not None:
        chosen = [item for item in items if _is_of_torch(item) is (config.option.torch == "only")]
        config.hook.pytest_deselected(
            items=[item for item in items if _is_of_torch(item) is (config.option.torch == "none")]
        )
        items[:] = chosen
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
