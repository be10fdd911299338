"""transformers' tokenizer is read by whichever threads first ask for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.contract

PROGRAM = """
import sys, threading
from millpond import Engine
engine, found = Engine(sys.argv[1]), []
start = threading.Barrier(8)
def ask():
    start.wait()
    found.append(type(engine.tokenizer).__name__)
threads = [threading.Thread(target=ask) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len(found), len(set(found)))
"""


@pytest.mark.torch
def test_threads_that_ask_for_the_tokenizer_at_once_all_get_it(checkpoint_of: Callable[..., Path]) -> None:
    """In a process of its own: transformers imports its parts on first use, and not for two threads at a time."""
    command = [sys.executable, "-c", PROGRAM, str(checkpoint_of("bert"))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.stdout.split() == ["8", "1"], result.stderr[-2000:]
