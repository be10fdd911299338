"""The number of malloc arenas for a server's threads, counted in a separate process."""

import json
import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.contract

CODE = """
import ctypes, json, sys, tempfile, threading
from xml.etree import ElementTree
from millpond.support import heap

done = heap.limit_arenas() if sys.argv[1] == "limited" else None
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
together = threading.Barrier(8)

def take():
    together.wait()
    for _ in range(200):
        libc.malloc(1000)
    together.wait()

threads = [threading.Thread(target=take) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc.fopen.restype = ctypes.c_void_p
with tempfile.NamedTemporaryFile() as file:
    stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    print(json.dumps([done, len(ElementTree.parse(file.name).findall("heap"))]))
"""


def count_arenas(setting, **environment):
    run = subprocess.run(
        [sys.executable, "-c", CODE, setting],
        env={**{k: v for k, v in os.environ.items() if k != "MALLOC_ARENA_MAX"}, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(run.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_threads_share_two_arenas():
    assert count_arenas("default")[1] > 2
    assert count_arenas("limited") == [True, 2]


def test_the_environment_takes_precedence():
    assert count_arenas("limited", MALLOC_ARENA_MAX="3")[0] is False
