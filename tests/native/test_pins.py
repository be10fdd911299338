"""MILLPOND_PIN: each of the kernels' threads on a core; callers go where they like."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from millpond.native import library

pytestmark = pytest.mark.skipif(
    library.portable() is None or not hasattr(os, "sched_getaffinity"), reason="no compiled kernels, or no affinity"
)

CODE = """
import os
import time
from pathlib import Path
import numpy as np
from tests.tiny import write_checkpoint
from millpond import Engine

before = set(os.listdir("/proc/self/task"))
engine = Engine(write_checkpoint(Path(os.environ["FOLDER"]) / "model", "bert"), dtype="float32", device="cpu")
model = engine._replicas.runner.model
ids = np.arange(5, 45, dtype=np.int32)
for _ in range(3):
    model.encoder.encode(ids, np.array([0, 40], dtype=np.int32), threads=3)
whole = os.sched_getaffinity(0)
for _ in range(600 if os.environ["MILLPOND_PIN"] == "1" else 1):  # until each of the two threads has begun
    masks = [os.sched_getaffinity(int(task)) for task in set(os.listdir("/proc/self/task")) - before]
    pinned = sorted(sorted(mask) for mask in masks if mask != whole)
    if len(pinned) == 2:
        break
    time.sleep(0.1)
print(pinned, sorted(whole))
"""


@pytest.mark.contract
@pytest.mark.parametrize("pin", ["1", "0", "yes"])
def test_the_threads_of_the_kernels_stay_on_cores_of_the_process(pin: str, tmp_path: object) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core")
    path = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "MILLPOND_PIN": pin, "FOLDER": str(tmp_path), "PYTHONPATH": path}
    run = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=True)
    cores = sorted(os.sched_getaffinity(0), reverse=True)
    pinned = sorted([core] for core in (cores * 2)[:2]) if pin == "1" else []
    assert run.stdout == f"{pinned} {sorted(cores)}\n"
    assert ("MILLPOND_PIN=yes is ignored" in run.stderr) is (pin == "yes")
