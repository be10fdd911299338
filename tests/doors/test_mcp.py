"""``millpond mcp`` through the official client: standard input and HTTP, today's protocol and the one before it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.door

Ask = Callable[[Any], Awaitable[Any]]
MODES = ("auto", "legacy")
FILES = {
    "README.md": "# Bakery\nBakes bread.\n\n## Opening hours\nFrom seven in the morning, but never on Mondays.\n",
    "src/oven.py": '"""Ovens."""\n\n\ndef preheat(celsius):\n    """Bring the oven to a temperature before baking."""\n'
    "    return celsius\n\n\nclass Dough:\n    def knead(self, minutes):\n        return self\n",
    "src/till.ts": "export class Till {\n  pay(sum: number): number { return sum; }\n}\n",
    "notes.txt": "Flour is bought from the mill at the pond.\n",
    "secret.log": "the password of the safe\n",
    ".gitignore": "*.log\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "bakery"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "image.png").write_bytes(b"\x89PNG\0\0")
    return root


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "MILLPOND_API_KEY"}
    return kept | {"XDG_CACHE_HOME": str(tmp_path / "cache")}


def over_stdio(words: list[str], environment: dict[str, str], mode: str, ask: Ask) -> Any:
    """What a coroutine of a client's session returns."""
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client

    async def run() -> Any:
        server = StdioServerParameters(command=sys.executable, args=["-m", "millpond", "mcp", *words], env=environment)
        with log_of(environment).open("a") as log:
            async with Client(stdio_client(server, errlog=log), mode=mode) as client:
                return await ask(client)

    return asyncio.run(run())


def log_of(environment: dict[str, str]) -> Path:
    """What servers write on standard error."""
    return Path(environment["XDG_CACHE_HOME"]).with_suffix(".log")


@contextmanager
def serving(words: list[str], environment: dict[str, str]) -> Iterator[str]:
    """The URL of a server over HTTP."""
    command = [sys.executable, "-m", "millpond", "mcp", *words, "--http", "127.0.0.1:0"]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stderr is not None
        line = server.stderr.readline()
        found = re.fullmatch(r"serving at (http://127\.0\.0\.1:\d+/mcp)\n", line)
        assert found is not None, line + server.stderr.read()
        yield found[1]
    finally:
        server.terminate()
        server.communicate(timeout=30)


async def called(client: Any, tool: str, **arguments: Any) -> dict[str, Any]:
    """The structured answer of a tool."""
    result = await client.call_tool(tool, arguments)
    assert not result.is_error, result.content
    assert isinstance(result.structured_content, dict)
    return result.structured_content


async def refused(client: Any, tool: str, **arguments: Any) -> str:
    """The message of a tool that refuses."""
    result = await client.call_tool(tool, arguments)
    assert result.is_error
    return str(result.content[0].text)


@pytest.mark.parametrize("mode", MODES)
def test_a_folder_over_standard_input(folder: Path, environment: dict[str, str], mode: str):
    async def ask(client: Any) -> None:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(tools) == {"search", "get", "explain"}
        assert all(tool.output_schema and tool.output_schema["type"] == "object" for tool in tools.values())
        assert all(tool.annotations.read_only_hint for tool in tools.values())
        answer = await called(client, "search", query="when is the shop open?", top_k=3)
        best = answer["hits"][0]
        assert best["id"] == "README.md:4-5" and best["metadata"]["name"] == "Bakery > Opening hours"
        assert answer["searched"] == [
            {"target": "bakery", "facts": {"files": 6, "units": 7, "skipped": {"ignored": 1, "binary": 1}}}
        ]
        hits = (await called(client, "search", query="heat the oven", filter={"kind": "function"}))["hits"]
        assert [hit["id"] for hit in hits] == ["src/oven.py:1-6"]
        hits = (await called(client, "search", query="password of the safe"))["hits"]
        assert hits and not [hit for hit in hits if "password" in hit["text"]]
        text = await called(client, "get", id=best["id"])
        assert text["text"] == "## Opening hours\nFrom seven in the morning, but never on Mondays."
        matches = (await called(client, "explain", query="open Monday", id=best["id"]))["matches"]
        monday = next(match for match in matches if match["token"] == "monday")
        assert text["text"][monday["start"] : monday["end"]] == "Mondays" == monday["text"]

        (folder / "README.md").write_text("# Bakery\nClosed for ever.\n")
        (folder / "notes.txt").unlink()
        (folder / "new.md").write_text("# Delivery\nBy bicycle.\n")
        ids = {hit["id"] for hit in (await called(client, "search", query="closed bicycle delivery mill"))["hits"]}
        assert {"README.md:1-2", "new.md:1-2"} <= ids and not [id for id in ids if id.startswith("notes")]
        assert "no text of id 'README.md:4-5' now" in await refused(client, "get", id="README.md:4-5")

    over_stdio([str(folder)], environment, mode, ask)


def test_a_start_removes_the_indexes_that_nobody_uses(folder: Path, environment: dict[str, str]):
    cache = Path(environment["XDG_CACHE_HOME"]) / "millpond" / "mcp"
    cache.mkdir(parents=True)
    old, then = cache / "old.db", time.time() - 91 * 86_400
    old.write_bytes(b"")
    os.utime(old, (then, then))

    async def ask(client: Any) -> set[str]:
        await called(client, "search", query="when is the shop open?")
        return {path.suffix for path in cache.iterdir()}

    assert over_stdio([str(folder)], environment, "auto", ask) >= {".db", ".use"}
    assert not old.exists()
    (mark,) = cache.glob("*.use")
    assert mark.read_text() == str(folder) and mark.with_suffix(".db").stat().st_size > 0


@pytest.mark.parametrize("mode", MODES)
def test_mistakes_are_answers_of_a_line(folder: Path, environment: dict[str, str], mode: str):
    async def ask(client: Any) -> None:
        assert "query is blank" in await refused(client, "search", query=" ")
        assert "top_k=0 must be 1 to 100" in await refused(client, "search", query="x", top_k=0)
        assert "empty dict" in await refused(client, "search", query="x", filter={"kind": {}})
        assert "no text of id '../secret'" in await refused(client, "get", id="../secret")
        assert "target='x' is none of" in await refused(client, "search", query="x", target="x")

    over_stdio([str(folder)], environment, mode, ask)
    assert log_of(environment).read_text() == ""


@pytest.mark.parametrize("mode", MODES)
def test_a_folder_over_http(folder: Path, environment: dict[str, str], mode: str):
    from mcp import Client

    async def run(url: str) -> Any:
        async with Client(url, mode=mode) as client:
            return await called(client, "search", query="when is the shop open?", top_k=1)

    with serving([str(folder)], environment) as url:
        assert asyncio.run(run(url))["hits"][0]["id"] == "README.md:4-5"


def test_a_key_is_asked_for_over_http(folder: Path, environment: dict[str, str]):
    import httpx2
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    async def run(url: str) -> Any:
        http = httpx2.AsyncClient(headers={"Authorization": "Bearer right"})
        async with http, Client(streamable_http_client(url, http_client=http)) as client:
            return await called(client, "search", query="bread", top_k=1)

    def status(url: str, headers: dict[str, str]) -> int:
        request = urllib.request.Request(url, b"{}", headers={"Content-Type": "application/json", **headers})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    with serving([str(folder)], environment | {"MILLPOND_API_KEY": "right"}) as url:
        assert status(url, {}) == status(url, {"Authorization": "Bearer wrong"}) == 401
        assert status(url, {"Authorization": "Bearer right"}) != 401
        assert status(url, {"Authorization": "Bearer right", "Host": "evil.example"}) == 421
        assert asyncio.run(run(url))["hits"]


@pytest.mark.parametrize(
    "words", [["nowhere"], [".", "--http", "nonsense"], [".", "--api-key", "x"], [".", "--model", "x/y/z"]]
)
def test_mistakes_in_the_command(tmp_path: Path, environment: dict[str, str], words: list[str]):
    if words[1:2] == ["--model"]:
        words = [*words, "--http", "127.0.0.1:0"]
    command = [sys.executable, "-m", "millpond", "mcp", *words]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, input="")
    assert run.returncode == 2 and "Traceback" not in run.stderr and run.stderr.startswith(("millpond: ", "ERROR"))


@pytest.mark.parametrize("terminal", [True, False])
def test_ctrl_c_ends_the_server(folder: Path, environment: dict[str, str], terminal: bool):
    """Whoever types the command is told what it waits for."""
    command = [sys.executable, "-m", "millpond", "mcp", str(folder)]
    ours, theirs = os.openpty() if terminal else os.pipe()[::-1]
    with (
        open(ours, "wb", buffering=0),
        open(theirs, "rb", buffering=0) as given,
        subprocess.Popen(command, env=environment, stdin=given, stderr=subprocess.PIPE, stdout=-3, text=True) as server,
    ):
        try:
            assert server.stderr is not None
            if terminal:
                assert server.stderr.readline().startswith("waiting for a client on standard input")
            index = Path(environment["XDG_CACHE_HOME"]) / "millpond" / "mcp"
            while not list(index.glob("*")):
                assert server.poll() is None
                time.sleep(0.05)
            server.send_signal(signal.SIGINT)
            assert server.wait(timeout=20) == -signal.SIGINT
            assert server.stderr.read() == ""
        finally:
            server.kill()


@pytest.mark.parametrize("kind", ["plaid", "memory"])
def test_an_index_can_be_searched_and_changed(tmp_path: Path, environment: dict[str, str], minilm: str, kind: str):
    from millpond import Engine
    from millpond.late_interaction import MemoryIndex, PlaidIndex

    path = tmp_path / "index"
    with Engine(minilm) as engine:
        index: Any = PlaidIndex(path, engine) if kind == "plaid" else MemoryIndex(engine)
        index.add(["a", "b"], ["Dough rises by yeast.", "An engine burns fuel."], [{"n": 1}, {"n": 2}])
        if kind == "memory":
            index.save(path)
        index.close()

    async def ask(client: Any) -> None:
        hits = (await called(client, "search", query="why does bread rise?", top_k=1))["hits"]
        assert [(hit["id"], hit["metadata"]) for hit in hits] == [("a", {"n": 1})]
        document = {"id": "c", "text": "Sails catch the wind.", "metadata": {"n": 3}}
        assert await called(client, "add", documents=[document]) == {"target": "index", "stored": 1}
        hits = (await called(client, "search", query="wind", filter={"n": {"gte": 2}}, top_k=1))["hits"]
        assert [hit["id"] for hit in hits] == ["c"]
        assert (await called(client, "explain", query="wind", id="c"))["matches"]
        await called(client, "delete", ids=["c"])
        assert "no text of id 'c'" in await refused(client, "get", id="c")
        assert "blank" in await refused(client, "add", documents=[{"id": "d", "text": " "}])

    over_stdio([str(path), "--writable"], environment, "auto", ask)
    with Engine(minilm) as engine, (PlaidIndex if kind == "plaid" else MemoryIndex).open(path, engine) as again:  # type: ignore[attr-defined]
        assert again.ids() == ["a", "b"]


@pytest.mark.parametrize("sparse", [False, True])
def test_a_collection_can_be_searched_and_changed(
    tmp_path: Path, environment: dict[str, str], minilm: str, sparse: bool
):
    from tests.tiny.heads import write_splade

    from millpond import Engine
    from millpond.ingest import Chunking, ingest, open_sink

    url = f"qdrant+path:{tmp_path / 'vectors'}#docs"
    long = " ".join(f"Sentence {number} tells of bread and dough." for number in range(90))
    records = [{"id": "long", "text": long}, {"id": "fuel", "text": "An engine burns fuel.", "year": 2020}]
    with Engine(minilm) as engine, Engine(write_splade(tmp_path / "splade") if sparse else minilm) as other:
        sink = open_sink(url, hybrid=sparse)
        report = ingest(
            records,
            engine=engine,
            sink=sink,
            chunking=Chunking(),
            sparse_engine=other if sparse else None,
            show_progress=False,
        )
        sink.close()
    assert report.failed == 0

    async def ask(client: Any) -> None:
        hits = (await called(client, "search", query="what burns fuel?"))["hits"]
        ids = [hit["id"] for hit in hits]
        assert "fuel" in ids if sparse else ids[0] == "fuel"  # the tiny SPLADE knows nothing
        assert hits[ids.index("fuel")]["metadata"]["year"] == 2020
        hits = (await called(client, "search", query="bread", filter={"year": 2020}))["hits"]
        assert [hit["id"] for hit in hits] == ["fuel"]
        assert (await called(client, "get", id="long"))["text"] == long
        added = await called(client, "add", documents=[{"id": "sail", "text": "Sails catch the wind."}])
        assert added == {"target": "docs", "stored": 1}
        hits = (await called(client, "search", query="wind in sails"))["hits"]
        assert "sail" in {hit["id"] for hit in hits}
        assert (await called(client, "explain", query="wind", id="sail"))["score"] > 0
        await called(client, "delete", ids=["sail", "long"])
        assert {hit["id"] for hit in (await called(client, "search", query="bread wind"))["hits"]} == {"fuel"}

    over_stdio([url, "--writable"], environment, "auto", ask)


def test_several_targets_and_a_folder_that_is_not_written_to(folder: Path, tmp_path: Path, environment: dict[str, str]):
    other = tmp_path / "garden"
    other.mkdir()
    (other / "plan.md").write_text("# Beans\nSown in May.\n")

    async def ask(client: Any) -> None:
        hits = (await called(client, "search", query="when are beans sown?", top_k=4))["hits"]
        assert "garden::plan.md:1-2" in {hit["id"] for hit in hits[:2]}
        assert {hit["id"].partition("::")[0] for hit in hits} == {"bakery", "garden"}
        hits = (await called(client, "search", query="beans", target="bakery"))["hits"]
        assert {hit["id"].partition("::")[0] for hit in hits} == {"bakery"}
        assert (await called(client, "get", id="garden::plan.md:1-2"))["text"] == "# Beans\nSown in May."
        message = await refused(client, "add", documents=[{"id": "x", "text": "x"}], target="garden")
        assert "change the files themselves" in message
        assert "change the files themselves" in await refused(client, "delete", ids=["garden::plan.md:1-2"])
        assert (other / "plan.md").exists()

    over_stdio([str(folder), str(other), "--writable"], environment, "auto", ask)


def test_answers_are_cut_to_their_budget(folder: Path, environment: dict[str, str]):
    for number in range(30):
        (folder / f"{number}.txt").write_text(f"bread {number} " * 140)

    async def ask(client: Any) -> None:
        result = await client.call_tool("search", {"query": "bread", "top_k": 20})
        hits = result.structured_content["hits"]
        assert len(hits) > 3 and any(hit["truncated"] for hit in hits)
        assert sum(len(hit["text"]) + len(str(hit["metadata"])) for hit in hits) <= 4000
        whole = await called(client, "get", id=hits[0]["id"])
        assert not whole["truncated"] and len(whole["text"]) > len(hits[0]["text"])

    over_stdio([str(folder), "--max-characters", "4000"], environment, "auto", ask)


def test_a_search_does_not_wait_for_ever(folder: Path, environment: dict[str, str]):
    """A large folder takes minutes the first time, and clients give up after one."""
    for number in range(300):
        (folder / f"{number}.txt").write_text(" ".join(f"word{number * each}" for each in range(300)))

    async def ask(client: Any) -> str:
        message = await refused(client, "search", query="bread")
        while (await client.call_tool("search", {"query": "bread"})).is_error:
            continue  # each call waits for its 0.05 seconds
        return message

    message = over_stdio([str(folder), "--wait", "0.05"], environment, "auto", ask)
    assert re.search(r"'bakery' is still being read: \d+ of \d+ changed files are done; ask again", message)


def test_rerank(folder: Path, environment: dict[str, str]):
    async def ask(client: Any) -> None:
        hits = (await called(client, "search", query="when is the shop open?", top_k=2))["hits"]
        assert hits[0]["id"] == "README.md:4-5" and hits[0]["score"] > 1  # MaxSim, no fused ranks

    over_stdio([str(folder), "--rerank", "self"], environment, "auto", ask)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_an_address_that_is_taken(folder: Path, environment: dict[str, str]):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [sys.executable, "-m", "millpond", "mcp", str(folder), "--http", address]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 2 and address in run.stderr and "choose another" in run.stderr


def test_the_start_is_told_in_the_log_alone(folder: Path, environment: dict[str, str]):
    """Standard output belongs to the protocol."""
    command = [sys.executable, "-m", "millpond", "--log-level", "info", "mcp", str(folder)]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    )
    out, _ = server.communicate(b"", timeout=60)
    assert out == b"" and server.returncode == 0
