"""``millpond serve`` from start to stop: its command line, sockets, TLS and signals.

Most tests run the command in this process, where it owns the main thread and its signals, and call it from a second
thread. Two processes show the rest: what is printed while it runs, and the exit by a second signal.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.server.launch.conftest import Certify

import millpond
from millpond.errors import InvalidRequestError, ModelLoadError
from millpond.server import ModelConfig, ServerConfig
from millpond.server import serve as serve_models
from tests.server.conftest import main, run, sockets, until

pytestmark = pytest.mark.contract

DOCKERFILE = Path(__file__).parents[3] / "Dockerfile"
SECONDS = 120  # how long anything may take before the test gives up
SETTINGS = ("MILLPOND_", "VLLM_")  # how the variables begin that a server reads


@pytest.fixture(autouse=True)
def arena_limits(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """A server in this process reads no settings of the developer's shell, and leaves malloc as it is.

    Contains an item for each time that a server limited the arenas.
    """
    for name in [name for name in os.environ if name.startswith(SETTINGS)]:
        monkeypatch.delenv(name)
    limits: list[None] = []
    monkeypatch.setattr(run.heap, "limit_arenas", lambda: limits.append(None))
    return limits


@dataclass(frozen=True, kw_only=True)
class Process:
    """A server in its own process, ready for requests."""

    process: subprocess.Popen[str]
    address: str
    printed: tuple[str, ...]

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])


@contextmanager
def served(*words: object, environ: dict[str, str] | None = None) -> Iterator[Process]:
    """``millpond serve`` in its own process."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    process = subprocess.Popen(
        [sys.executable, "-m", "millpond", "serve", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**clean, "OMP_NUM_THREADS": "1", **(environ or {})},
    )
    assert process.stdout is not None
    try:
        printed = []
        for line in process.stdout:
            printed.append(line.rstrip())
            if line.startswith("every route"):
                break
        else:
            pytest.fail(f"the server ended: {process.communicate()[1]}")
        yield Process(process=process, address=printed[0].split()[2], printed=tuple(printed))
    finally:
        process.kill()
        process.communicate()


@dataclass(frozen=True, kw_only=True)
class Ended:
    """``millpond serve`` after its end."""

    code: object
    out: str
    log: str
    result: Any


Serve = Callable[..., Ended]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], unlogged: None) -> Iterator[Serve]:
    """Runs ``millpond serve`` in this thread, while ``client`` runs in another one and ends it by a signal.

    A SIGTERM that comes while the server does not handle it yet, or after its end, does not end the tests.
    """
    running = threading.Event()

    def end(number: int, _: object) -> None:
        if running.is_set():
            raise SystemExit(128 + number)

    def serve(*words: object, client: Callable[[], Any]) -> Ended:
        monkeypatch.setattr(sys, "argv", ["millpond", "serve", *map(str, words)])

        def call() -> Any:
            running.wait(SECONDS)
            try:
                return client()
            except BaseException:
                send_signal(signal.SIGTERM)
                raise

        code: object = 0
        with ThreadPoolExecutor(1) as threads:
            called = threads.submit(call)
            try:
                running.set()
                main()
            except SystemExit as ended:
                code = ended.code
            finally:
                running.clear()
            out, log = capsys.readouterr()
            return Ended(code=code or 0, out=out, log=log, result=called.result(timeout=SECONDS))

    previous = signal.signal(signal.SIGTERM, end)
    yield serve
    signal.signal(signal.SIGTERM, previous)


def send_signal(number: int) -> None:
    """To the main thread, where the server runs."""
    assert threading.main_thread().ident is not None
    signal.pthread_kill(threading.main_thread().ident, number)


def wait_for(address: int | Path) -> None:
    """Until somebody listens on a port, or on a Unix socket."""

    def listens() -> bool:
        with socket.socket(socket.AF_INET if isinstance(address, int) else socket.AF_UNIX) as probe:
            return probe.connect_ex(("127.0.0.1", address) if isinstance(address, int) else str(address)) == 0

    until(listens)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, embedder: Path, cross_encoder: Path) -> Iterator[Process]:
    """Two models from a file, a key from the environment, a log in JSON."""
    path = tmp_path_factory.mktemp("serve") / "server.yaml"
    models = {
        "vectors": {"model": str(embedder), "max_model_len": 32},
        "ranks": {"model": str(cross_encoder), "served_model_name": "judge"},
    }
    path.write_text(
        yaml.safe_dump({"port": 1, "dtype": "float32", "enforce-eager": True, "models": models}, sort_keys=False)
    )
    environ = {"MILLPOND_CONFIG": str(path), "VLLM_API_KEY": "token-abc123"}
    with served("--port", 0, "--log-format", "json", "-tp", 1, environ=environ) as process:
        yield process


def test_it_prints_its_models_and_its_address(two: Process):
    head, *models, last = two.printed
    assert head == f"serving at http://127.0.0.1:{two.port} (millpond {millpond.__version__})"
    assert models == ["  vectors: embed, token_embed", "  ranks (also judge): classify, reward, score, token_classify"]
    assert last == f"every route: {two.address}/docs"


def test_the_check_of_the_container(two: Process):
    (check,) = re.findall(r"^HEALTHCHECK .*\\\n\s+CMD (.*)$", DOCKERFILE.read_text(encoding="utf-8"), re.MULTILINE)
    _, *words = json.loads(check)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        for port, alive in ((two.port, True), (closed.getsockname()[1], False)):
            environ = {**os.environ, "MILLPOND_PORT": str(port), "http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
            ended = subprocess.run([sys.executable, *words], env=environ, capture_output=True, timeout=SECONDS)
            assert (ended.returncode == 0) is alive, ended.stderr


def half_a_request(port: int) -> tuple[socket.socket, bytes]:
    """A request whose route waits for the second half of its body: (the connection, the half)."""
    body = json.dumps({"input": "the mill stands by the pond"}).encode()
    connection = socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
    connection.sendall(
        b"POST /v1/embeddings HTTP/1.1\r\nHost: millpond\r\nContent-Type: application/json\r\n"
        b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body)
    )
    assert connection.recv(1024).startswith(b"HTTP/1.1 100"), "sent when the route reads the body"
    connection.sendall(body[:10])
    return connection, body[10:]


def wait_until_refused(port: int) -> None:
    """Until the server has handled the signal; before, it still accepts connections."""
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=SECONDS).close()
        except ConnectionError:
            return


def read_all(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@pytest.fixture
def reserved() -> Iterator[int]:
    """A port that nobody else gets, and that a server may listen on."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def test_a_running_request_is_finished_while_new_ones_are_refused(serve: Serve, embedder: Path, reserved: int):
    def client() -> bytes:
        wait_for(reserved)
        connection, rest = half_a_request(reserved)
        with connection:
            send_signal(signal.SIGTERM)
            wait_until_refused(reserved)
            connection.sendall(rest)
            return read_all(connection)

    ended = serve(embedder, "--port", reserved, "--drain-timeout", SECONDS, client=client)
    assert ended.result.startswith(b"HTTP/1.1 200"), ended.result
    assert b'"embedding":[' in ended.result
    assert ended.code == 0, ended.log
    assert "stopping: requests that run have 120 s" in ended.log
    assert "graceful shutdown exceeded" not in ended.log  # a connection accepted at the last moment is told, too


def test_a_request_that_does_not_end_is_given_up(serve: Serve, embedder: Path, reserved: int):
    def client() -> bytes:
        wait_for(reserved)
        connection, _ = half_a_request(reserved)
        with connection:
            send_signal(signal.SIGTERM)
            return read_all(connection)

    ended = serve(embedder, "--port", reserved, "--drain-timeout", "0", client=client)
    assert ended.result.startswith(b"HTTP/1.1 503"), ended.result
    assert b"ServiceUnavailableError" in ended.result
    assert ended.code == 0, ended.log
    assert "Traceback" not in ended.log


def test_a_second_signal_ends_it_at_once(embedder: Path):
    with served(embedder, "--port", 0, "--drain-timeout", SECONDS) as server:
        connection, _ = half_a_request(server.port)
        with connection:
            server.process.send_signal(signal.SIGTERM)
            wait_until_refused(server.port)
            assert server.process.poll() is None
            server.process.send_signal(signal.SIGTERM)
            server.process.communicate(timeout=SECONDS)
    assert server.process.returncode == 128 + signal.SIGTERM


def test_nobody_is_answered_before_the_models_are_loaded(serve: Serve, tmp_path: Path, embedder: Path, reserved: int):
    template = tmp_path / "template.jinja"
    os.mkfifo(template)  # read while the model is loaded, which waits for data that never comes

    def client() -> None:
        with template.open("wb"):  # opens when the other side does
            with pytest.raises(ConnectionError):
                socket.create_connection(("127.0.0.1", reserved), timeout=SECONDS)
            send_signal(signal.SIGTERM)

    ended = serve(embedder, "--port", reserved, "--chat-template", template, client=client)
    assert ended.code == 128 + signal.SIGTERM, ended.log
    assert ended.out == ""
    assert "Traceback" not in ended.log


def test_a_model_that_cannot_be_loaded_leaves_nothing_behind(
    serve: Serve, tmp_path: Path, embedder: Path, reserved: int
):
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    threads = {thread for thread in threading.enumerate() if thread.name.startswith("millpond")}
    ended = serve(embedder, tmp_path, "--port", reserved, client=lambda: None)
    assert ended.code == 2
    assert ended.out == ""
    (line,) = ended.log.splitlines()
    assert line.startswith("millpond: ")
    assert str(tmp_path) in line
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", reserved), timeout=SECONDS)
    assert {thread for thread in threading.enumerate() if thread.name.startswith("millpond")} <= threads


def test_a_port_that_is_taken_is_told_before_anything_is_loaded(embedder: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidRequestError, match=f"port={port} cannot be listened on .*choose another port"):
            serve_models([ModelConfig(model="nowhere")], ServerConfig(port=port), ready=lambda *_: None)


@pytest.mark.parametrize(
    ("config", "warned"),
    [
        (ServerConfig(host="0.0.0.0", port=0), True),
        (ServerConfig(host="0.0.0.0", port=0, api_keys=("key",)), False),
        (ServerConfig(host="localhost", port=0), False),
    ],
)
def test_an_open_server_beyond_this_machine_is_warned_of(
    config: ServerConfig, warned: bool, caplog: pytest.LogCaptureFixture, tmp_path: Path, arena_limits: list[None]
):
    with pytest.raises(ModelLoadError):
        serve_models([ModelConfig(model=str(tmp_path))], config, ready=lambda *_: None)
    assert ("asks for no API key" in caplog.text) is warned
    assert arena_limits == [None]


def test_a_unix_socket(serve: Serve, embedder: Path, tmp_path: Path):
    path = tmp_path / "millpond.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))  # the file that a killed server leaves behind

    def client() -> None:
        wait_for(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://millpond", timeout=SECONDS) as http:
            assert http.get("/health").status_code == 200
            assert http.post("/v1/embeddings", json={"input": "one"}).status_code == 200
        with pytest.raises(InvalidRequestError, match="belongs to a server that runs"):
            sockets.bind(ServerConfig(uds=path))
        send_signal(signal.SIGTERM)

    ended = serve(embedder, "--uds", path, client=client)
    assert ended.code == 0, ended.log
    assert ended.out.startswith(f"serving at unix:{path} ")
    assert not path.exists()


def test_a_unix_socket_does_not_replace_a_file(tmp_path: Path):
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(InvalidRequestError, match="is a file of another kind"):
        sockets.bind(ServerConfig(uds=path))
    with pytest.raises(InvalidRequestError, match="cannot be listened on"):
        sockets.bind(ServerConfig(uds=tmp_path / "none" / "a.sock"))
    assert path.read_text() == "mine"


def test_tls_and_certificates_of_clients_and_keys_that_are_not_logged(
    serve: Serve, embedder: Path, certify: Certify, reserved: int
):
    certificate, key = certify("server")
    client_certificate, client_key = certify("client")
    address = f"https://127.0.0.1:{reserved}"

    def client() -> None:
        wait_for(reserved)
        trusting = ssl.create_default_context(cafile=certificate)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{address}/health", verify=trusting, timeout=SECONDS, trust_env=False)
        trusting.load_cert_chain(client_certificate, client_key)
        for api_key, status in (("s3cr3t", 200), ("wr0ng", 401)):
            headers = {"Authorization": f"Bearer {api_key}"}
            answer = httpx.get(
                f"{address}/v1/models", headers=headers, verify=trusting, timeout=SECONDS, trust_env=False
            )
            assert answer.status_code == status
        send_signal(signal.SIGINT)

    flags = ["--ssl-certfile", certificate, "--ssl-keyfile", key, "--ssl-ca-certs", client_certificate]
    flags += ["--api-key", "s3cr3t", "--log-format", "json"]
    ended = serve(embedder, "--port", reserved, *flags, client=client)
    assert ended.code == 0, ended.log
    assert ended.out.startswith(f"serving at {address} ")
    assert "s3cr3t" not in ended.log
    assert "wr0ng" not in ended.log
    assert any(json.loads(line).get("route") == "/v1/models" for line in ended.log.splitlines())


def test_tls_of_files_that_do_not_belong_together(certify: Certify):
    certificate, _ = certify("one")
    _, key = certify("two")
    with pytest.raises(InvalidRequestError, match="do not work together"):
        sockets.check_certificates(ServerConfig(ssl_certfile=certificate, ssl_keyfile=key))
    with pytest.raises(InvalidRequestError, match="do not work together"):
        sockets.check_certificates(ServerConfig(ssl_certfile=certificate, ssl_keyfile=certificate))
    sockets.check_certificates(ServerConfig(ssl_certfile=certificate, ssl_keyfile=certify("one")[1].rename(key)))
