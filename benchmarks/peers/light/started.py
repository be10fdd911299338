"""One process of `benchmarks/light.py`, seen from its parent."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from peers.environments import UnavailableError

PROGRAM = Path(__file__).with_name("process.py")


class Started:
    """A process that has embedded one text; closed by ``with``.

    Args:
        python: The interpreter of the engine's environment.
        family: A key of ``process.FAMILIES``.
        model: The folder of the model.
        home: The folder of its home and caches.

    Attributes:
        first: Seconds until the first vector, and the vector.

    Raises:
        UnavailableError: The process ended before it answered.
    """

    def __init__(self, python: Path, family: str, model: Path, home: Path) -> None:
        self._log = home / f"{os.urandom(4).hex()}.log"
        began = time.monotonic()  # the same clock in all processes
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python, "-P", PROGRAM, family, model, repr(began)],
                env=variables(home, python),
                cwd=home,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.first = self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """The answer to a request."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            text = self._log.read_text(encoding="utf-8", errors="replace").strip()
            raise UnavailableError(f"{self._process.args} ended with {self._process.wait()}: {text[-600:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def run_command(python: Path, line: list[str], *, home: Path, text: str) -> float:
    """Seconds of a program of an environment, which reads ``text``.

    Raises:
        UnavailableError: It failed.
    """
    began = time.monotonic()
    done = subprocess.run(line, env=variables(home, python), cwd=home, input=text, capture_output=True, text=True)
    seconds = time.monotonic() - began
    if done.returncode:
        raise UnavailableError(f"{line} ended with {done.returncode}: {done.stderr.strip()[-600:]}")
    return seconds


def variables(home: Path, python: Path) -> dict[str, str]:
    """All variables of a process: no setting of the user, no hub; the modules of a checkout only in its environment."""
    checkout = os.environ.get("PYTHONPATH", "") if str(python) == sys.executable else ""
    return {
        "PATH": os.defpath,
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home / "cache"),
        "HF_HUB_OFFLINE": "1",
        "LANG": "C.UTF-8",
        "PYTHONPATH": checkout,
    }
