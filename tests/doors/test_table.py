"""The table of doors: its versions are those installed, its tests exist, and each program prints what it says."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.door

ROOT = Path(__file__).parents[2]
MODEL = "sentence-transformers/all-MiniLM-L6-v2"  # what the programs name
ADDRESS = "http://127.0.0.1:8000"  # where the programs look for a server


def _site() -> Any:
    spec = spec_from_file_location("doors_site", ROOT / "docs" / "site" / "doors.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


SITE = _site()
DOORS = SITE.doors()
each_door = pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)


@each_door
def test_a_door_is_tested_with_the_version_that_the_table_names(door):
    assert (ROOT / door.test).is_file() and door.cannot.strip()
    if door.package:
        print(f"{door.name}: {door.package} {version(door.package)}")
        assert version(door.package) == door.version


@pytest.mark.parametrize("door", [door for door in DOORS if door.program], ids=lambda door: door.name)
def test_a_program_prints_what_the_page_says(door, minilm, tmp_path):
    assert find_spec(Path(door.program).stem) is None  # run by its path, it does not import itself for the library
    text = (SITE.PROGRAMS / door.program).read_text(encoding="utf-8").replace(MODEL, minilm)
    with _serving([minilm if word == MODEL else word for word in door.serve]) as address:
        run = subprocess.run(
            [sys.executable, "-c", text.replace(ADDRESS, address)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == door.prints.strip()


@contextmanager
def _serving(words: list[str]) -> Iterator[str]:
    """The address of a server with these arguments; with none, no server."""
    if not words:
        yield ADDRESS
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    named = ["--served-model-name", MODEL] if "--served-model-name" not in words else []
    command = [sys.executable, "-m", "millpond", "serve", *words, *named, "--port", address.rpartition(":")[2]]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ})
    try:
        _wait(server, address)
        yield address
    finally:
        server.terminate()
        server.communicate(timeout=30)


def _wait(server: subprocess.Popen[str], address: str) -> None:
    """Until the server is ready."""
    while True:
        if server.poll() is not None:
            raise AssertionError(server.stderr.read() if server.stderr else "")
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.05)


def test_the_requirements_pin_each_library():
    pinned = dict(
        re.findall(r"^([\w-]+)==(\S+)$", (Path(__file__).parent / "requirements.txt").read_text(), re.MULTILINE)
    )
    for door in DOORS:
        assert not door.package or pinned.get(door.package, door.version) == door.version, door.name
