"""The measured HTTP servers: each is a process, reached over the loopback interface."""

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

NAME = "bench"  # served model name
START_TIMEOUT = 300.0  # seconds
STOP_TIMEOUT = 60.0  # seconds


class Server:
    """A server process.

    Args:
        name: Its name in results.
        command: The command that starts it.
        url: Its base URL.
        environ: Added to this process's environment.
        log: File for its output.
    """

    def __init__(self, name: str, command: Sequence[str], url: str, environ: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.url = url
        self.log = log
        began = time.perf_counter()
        with log.open("w", encoding="utf-8") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "true", **environ},
            )
        self._began = began

    def wait(self) -> float:
        """Wait until ``/health`` answers 200; the seconds since the start.

        Raises:
            UnavailableError: The process ended, or is not healthy after ``START_TIMEOUT``.
        """
        while not self._healthy():
            if self.process.poll() is not None or time.perf_counter() - self._began > START_TIMEOUT:
                lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                self.close()
                raise UnavailableError(f"{self.name} did not start: {lines[-1][:300] if lines else 'no output'}")
            time.sleep(0.1)
        return time.perf_counter() - self._began

    def close(self) -> None:
        """Terminate the process; kill it after ``STOP_TIMEOUT``."""
        self.process.terminate()
        try:
            self.process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _healthy(self) -> bool:
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
    """``millpond serve`` with default settings and ``flags``."""
    port = free_port()
    words = ["-m", "millpond", "serve", str(model), "--served-model-name", NAME, "--port", str(port), *flags]
    return Server("millpond", [sys.executable, *words], f"http://127.0.0.1:{port}", {}, folder / "millpond-server.log")


def configured(file: Path, folder: Path) -> Server:
    """``millpond serve`` with a settings file."""
    port = free_port()
    words = ["-m", "millpond", "serve", "--config", str(file), "--port", str(port)]
    return Server("millpond", [sys.executable, *words], f"http://127.0.0.1:{port}", {}, folder / "millpond-server.log")


def vllm(python: str, model: Path, folder: Path) -> Server:
    """vLLM's OpenAI server, with the same settings as the competitor ``vllm``."""
    port = free_port()
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", NAME]
    words += ["--runner", "pooling", "--dtype", "bfloat16", "--no-enable-prefix-caching"]
    words += ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
    environ = COMPETITORS["vllm"].environ
    return Server("vllm", [python, *words], f"http://127.0.0.1:{port}", environ, folder / "vllm-server.log")


def free_port() -> int:
    """A free TCP port on the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
