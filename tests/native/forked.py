"""A warmed process, other threads of which compute, forks children that each run an encoder and end.

python -m tests.native.forked CHILDREN
"""

import os
import sys
import threading
import time

import numpy as np

from millpond.backends.native.encoder import NativeEncoder, bounds_of
from millpond.backends.native.kernels import kernels_of
from millpond.backends.native.plans.plan import PlanBuilder
from millpond.backends.native.self_check import VOCABULARY, post_norm, pre_norm

LENGTHS = (1, 40, 17, 64, 5)
WAIT = 60.0  # seconds for a child, which needs some milliseconds


def main(children: int) -> None:
    encoders = []
    for model in (post_norm, pre_norm):
        builder = PlanBuilder(kernels_of("float32"))
        model(builder, "float32")
        encoders.append(NativeEncoder(builder.build()))
    ids = np.random.default_rng(0).integers(0, VOCABULARY, sum(LENGTHS)).astype(np.int32)
    bounds = bounds_of(LENGTHS)

    def computed(threads: int) -> list[np.ndarray]:
        return [encoder.encode(ids, bounds, threads=threads) for encoder in encoders]

    right, stopped = computed(3), threading.Event()

    def compute() -> None:
        while not stopped.is_set():
            computed(2)

    others = [threading.Thread(target=compute) for _ in range(2)]
    for thread in others:
        thread.start()
    for child in range(children):
        pid = os.fork()
        if pid == 0:
            same = all(map(np.array_equal, computed(1 + child % 3), right))
            sys.exit(0 if same else 3)
        wait_for(pid)
    stopped.set()
    for thread in others:
        thread.join()
    assert all(map(np.array_equal, computed(3), right))
    print(children, "children")


def wait_for(pid: int) -> None:
    """The end of a child, which must be a good one."""
    deadline = time.monotonic() + WAIT
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            assert os.waitstatus_to_exitcode(status) == 0, status
            return
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            sys.exit("a child hangs")
        time.sleep(0.001)


if __name__ == "__main__":
    main(int(sys.argv[1]))
