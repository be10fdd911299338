"""A process whose native threads run may fork at any time: children start their own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from millpond.backends.native.plans.rotation import Rotation
from millpond.native import library

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks on this system"),
    pytest.mark.skipif(library.kernel_table() is None, reason="no compiled kernels"),
    pytest.mark.contract,
]


def test_two_hundred_children_of_a_warmed_process_embed_and_end():
    command = [sys.executable, "-m", "tests.native.forked", "200"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["200", "children"]


def test_tables_of_positions_grow_in_a_child_of_a_thread_that_did_not_let_them():
    rotation = Rotation(np.ones(16, dtype=np.float32))
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with rotation._lock:
            held.set()
            let_go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    pid = os.fork()
    if pid == 0:
        growing = threading.Thread(target=rotation.cover, args=(5000,), daemon=True)
        growing.start()
        growing.join(30)
        os._exit(0 if rotation.positions >= 5000 else 3)
    _, status = os.waitpid(pid, 0)
    let_go.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0
