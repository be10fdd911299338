"""HTTP servers under measurement: each a process, asked over the loopback device."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from peers.engines import COMPETITORS
from peers.environments import UnavailableError

NAME = "bench"  # what every server calls the model
PATIENCE = 300.0  # seconds that a server may take to come up
GRACE = 60.0  # seconds that it may take to end


class Server:
    """A server, from its start to its end.

    Args:
        name: What results call it.
        command: Starts it.
        url: Where it then is.
        environ: Added to this process's environment.
        log: File for all it says.
    """

    def __init__(self, name: str, command: Sequence[str], url: str, environ: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.url = url
        self.log = log
        began = time.perf_counter()
        with log.open("w", encoding="utf-8") as said:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true", **environ},
            )
        self._began = began

    def wait(self) -> float:
        """Wait until it is well; the seconds since its start.

        Raises:
            UnavailableError: It ended, or is not well after a while.
        """
        while not self._well():
            if self.process.poll() is not None or time.perf_counter() - self._began > PATIENCE:
                lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                self.close()
                raise UnavailableError(
                    f"{self.name} did not come up: {lines[-1][:300] if lines else 'it said nothing'}"
                )
            time.sleep(0.1)
        return time.perf_counter() - self._began

    def close(self) -> None:
        """End it."""
        self.process.terminate()
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _well(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def millpond(model: Path, folder: Path, *flags: str) -> Server:
    """``millpond serve``, with its defaults but for ``flags``."""
    port = free_port()
    words = ["-m", "millpond", "serve", str(model), "--served-model-name", NAME, "--port", str(port), *flags]
    return Server("millpond", [sys.executable, *words], f"http://127.0.0.1:{port}", {}, folder / "millpond-server.log")


def configured(file: Path, folder: Path) -> Server:
    """``millpond serve`` as a file of settings has it."""
    port = free_port()
    words = ["-m", "millpond", "serve", "--config", str(file), "--port", str(port)]
    return Server("millpond", [sys.executable, *words], f"http://127.0.0.1:{port}", {}, folder / "millpond-server.log")


def vllm(python: str, model: Path, folder: Path) -> Server:
    """``vllm serve`` with the settings of its row in the other tables."""
    port = free_port()
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", NAME]
    words += ["--runner", "pooling", "--dtype", "bfloat16", "--no-enable-prefix-caching"]
    words += ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
    environ = COMPETITORS["vllm"].environ
    return Server("vllm", [python, *words], f"http://127.0.0.1:{port}", environ, folder / "vllm-server.log")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
