"""A real Milvus for tests: that of the package milvus, in a network namespace without other interfaces."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import pytest

PORT, HEALTH_PORT = 19530, 9091
# Set where the server must start: there a test fails instead of being skipped.
REQUIRED = "MILLPOND_TEST_MILVUS"
# The server is killed when the process ends that holds the other end of the pipe, however that ends.
_UNTIL_THE_PIPE_CLOSES = '"$@" & read -r _; kill -KILL $!; wait $!'
# Also on a machine that runs a dozen other things.
_SECONDS = 180


class RunningMilvus:
    """A server whose data stay in a folder while it is killed and started again.

    Args:
        folder: A new folder.
    """

    url = f"http://127.0.0.1:{PORT}"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        milvus = importlib.import_module("milvus")
        milvus.MilvusServerConfig(data_dir=str(folder), proxy_port=PORT).resolve()
        milvus._initialize_data_files(str(folder))  # unpacks the program

    def start(self) -> None:
        """Start the process, which does not answer yet."""
        programs = self._folder / "bin"
        settings = {"DEPLOY_MODE": "STANDALONE", "METRICS_PORT": str(HEALTH_PORT)}
        settings |= {"MILVUS_RUN_DIR": str(self._folder / "run"), "LD_LIBRARY_PATH": str(programs)}
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", _UNTIL_THE_PIPE_CLOSES, "sh", programs / "milvus", "run", "standalone"],
                stdin=subprocess.PIPE,
                cwd=self._folder,
                env=os.environ | settings,
                stdout=log,
                stderr=log,
            )

    def wait(self) -> None:
        """Start the process unless it runs, and wait until every part of the server says that it is ready.

        It may still have to load collections.
        """
        if self._process is None:
            self.start()
        end = time.monotonic() + _SECONDS
        while not self._healthy():
            assert time.monotonic() < end, f"the server is not ready: {self._log()}"
            time.sleep(0.1)

    def kill(self) -> None:
        """End the process at once, as a machine that fails does."""
        if self._process is not None:
            self._process.communicate(timeout=60)
            self._process = None

    @contextmanager
    def database(self, name: str) -> Iterator[str]:
        """The URL of a new database, which is deleted at the end with its collections."""
        from pymilvus import MilvusClient

        self.wait()
        name = re.sub(r"\W", "_", name)
        url = f"{self.url}/{name}"
        server = MilvusClient(self.url)
        server.create_database(name)
        try:
            yield url
        finally:
            self.wait()
            client = MilvusClient(url)  # a server of this age has no use_database
            for collection in client.list_collections():
                client.drop_collection(collection)
            client.close()
            server.drop_database(name)
            server.close()

    def _healthy(self) -> bool:
        # Before a part has registered, none is ill.
        with (
            suppress(OSError),
            socket.create_connection(("127.0.0.1", PORT), timeout=10),
            urllib.request.urlopen(f"http://127.0.0.1:{HEALTH_PORT}/healthz", timeout=10) as answer,
        ):
            return b"OK" in answer.read()
        return False

    def _log(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-2000:]


@contextmanager
def running_milvus(folder: Path) -> Iterator[RunningMilvus]:
    """Start a server, which listens on every interface, where there is only the loopback; skip the test elsewhere."""
    if [name for _, name in socket.if_nameindex()] != ["lo"]:
        _unavailable("a Milvus listens on every interface, and is started where there is none: make test-milvus")
    if importlib.util.find_spec("milvus") is None:
        _unavailable("the package milvus, which has a server, is not installed: make test-milvus")
    server = RunningMilvus(folder)
    try:
        server.wait()
        yield server
    finally:
        server.kill()


def _unavailable(reason: str) -> NoReturn:
    if os.environ.get(REQUIRED):
        pytest.fail(reason)
    pytest.skip(reason)
