"""Servers over tiny checkpoints, in this process or on a local port."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient
from tests.server.mutations import INDEXES, KEY, MODELS, QUERY, TEXTS
from tests.tiny import Layout, Normalize, Pooling, write_checkpoint
from tests.tiny.heads import (
    write_cross_encoder,
    write_language_model,
    write_m3,
    write_nli,
    write_reward,
    write_splade,
    write_stanford,
)
from tests.tiny.hub import STAND_INS

from millpond import Engine
from millpond.cli.app import main
from millpond.engine.execute.runner import Runner
from millpond.late_interaction import PlaidIndex
from millpond.server import ModelConfig, ServedModels, ServerConfig, create_app
from millpond.server.api import ROUTERS
from millpond.server.launch import run, sockets
from millpond.server.launch.server import Server
from millpond.server.telemetry.logs import Formatter

if TYPE_CHECKING:
    from tests.recording import Recording

__all__ = ["ROUTERS", "Formatter", "Server", "main", "run", "sockets"]

CHAT_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool['name'] + '\n' }}{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@contextmanager
def running(models: ServedModels, config: ServerConfig | None = None) -> Iterator[str]:
    """A server on a free port of the loopback device; yields its address."""
    config = config or ServerConfig()
    with serving(create_app(models, config), config) as server:
        yield address_of(server)


@contextmanager
def serving(app: FastAPI, config: ServerConfig | None = None, *, keep_alive: float = 65) -> Iterator[Server]:
    """``app`` on a free port of the loopback device; a connection may wait ``keep_alive`` seconds for its client."""
    config = replace(config or ServerConfig(), host="127.0.0.1", port=0)
    server = Server(app, config, keep_alive=keep_alive)
    thread = threading.Thread(target=server.run, args=(sockets.bind(config),), daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(timeout=30)


def address_of(server: Server) -> str:
    """The address of a server from :func:`serving`."""
    return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


async def ask(app: FastAPI, method: str, path: str, **options: Any) -> httpx.Response:
    """One request to an application in this process."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=options.pop("raises", True))
    async with httpx.AsyncClient(transport=transport, base_url="http://pond") as client:
        return await client.request(method, path, **options)


def until(fact: Callable[[], bool]) -> None:
    """Wait until another thread makes the condition true."""
    for _ in range(30_000):
        if fact():
            return
        time.sleep(0.01)
    raise AssertionError("it never came about")


class Held:
    """A model whose forward passes wait until :meth:`release`."""

    def __init__(self, models: ServedModels, gate: threading.Event) -> None:
        self.models = models
        self.engine = next(iter(models)).engine
        self.release = gate.set

    @property
    def waiting(self) -> int:
        """Texts in progress."""
        return self.engine.stats().waiting_texts

    @property
    def cancelled(self) -> int:
        """Cancelled calls."""
        return self.engine.stats().calls_cancelled


@pytest.fixture
def held(embedder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Held]]:
    """Loads models that run nothing until they are released."""
    gate, run = threading.Event(), Runner.run

    def wait(self: Runner, requests: Any) -> Any:
        assert gate.wait(timeout=300)
        return run(self, requests)

    monkeypatch.setattr(Runner, "run", wait)
    yield lambda **options: Held(
        ServedModels.load([ModelConfig(model=str(embedder), names=("tiny",), dtype="float32", **options)]), gate
    )
    gate.set()


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    """The devices of engines, which only record."""
    from tests import recording

    return recording.backends_of_engines(monkeypatch)


def _folder(write: Callable[[Path], Path]) -> Any:
    """A fixture: the folder of a checkpoint."""

    @pytest.fixture(scope="session")
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write(tmp_path_factory.mktemp("server") / "model")

    return folder


def _write_prompted(folder: Path) -> Path:
    prompts = {"query": "find: ", "document": "keep: "}
    layout = Layout(modules=(Pooling(), Normalize()), prompts=prompts, default_prompt_name="document")
    return write_checkpoint(folder, "bert", sentence_transformers=layout, config={"matryoshka_dimensions": [16, 32]})


def _write_llm(folder: Path) -> Path:
    write_language_model(folder, "qwen3", ("<|im_start|>", "<|im_end|>"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return folder


# A sentence-transformers embedder: BERT, mean, normalized, 48 wide, 64 tokens.
embedder = _folder(lambda path: write_checkpoint(path, sentence_transformers=Layout(modules=(Pooling(), Normalize()))))
# A Matryoshka embedder with prompts for queries and documents; the latter is its default.
prompted = _folder(_write_prompted)
cross_encoder = _folder(write_cross_encoder)
# Queries of 12 tokens, documents of 24.
colbert = _folder(write_stanford)
classifier = _folder(lambda path: write_checkpoint(path, head="SequenceClassification"))
token_classifier = _folder(lambda path: write_checkpoint(path, head="TokenClassification"))
nli = _folder(write_nli)
sparse_embedder = _folder(write_splade)
# A process reward model: two columns at each <extra_0>; with a chat template.
reward_model = _folder(lambda path: write_reward(path, "Qwen2ForProcessRewardModel"))
# A reward model of one number a text; with a chat template.
outcome_reward = _folder(lambda path: write_reward(path, "InternLM2ForRewardModel"))
bge_m3 = _folder(write_m3)
# A language model that answers yes or no about a pair, recognized by its folder's name.
llm_reranker = _folder(lambda path: STAND_INS["Qwen/Qwen3-Reranker-0.6B"](path.with_name("Qwen3-Reranker-0.6B")))
# A generative Qwen3 that embeds by its last token; its chat template supports tools.
llm = _folder(_write_llm)


@pytest.fixture(scope="session")
def tiny(embedder: Path) -> Iterator[ServedModels]:
    """The embedder, called tiny."""
    models = ServedModels.load([ModelConfig(model=str(embedder), names=("tiny",), device="cpu", dtype="float32")])
    yield models
    models.close()


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[tuple[ServedModels, TestClient]]:
    """The models of one server, each named after its fixture, and its client."""
    names = ("embedder", "colbert")
    models = ServedModels.load(
        [ModelConfig(model=str(request.getfixturevalue(name)), names=(name,), dtype="float32") for name in names]
    )
    with TestClient(create_app(models)) as client:  # which closes the models
        yield models, client


@pytest.fixture(scope="session")
def every(request: pytest.FixtureRequest, indexes: tuple[str, ...]) -> Iterator[tuple[ServedModels, str]]:
    """The models and indexes in tests.server.mutations, on one server with its key, and its address."""
    configs = [ModelConfig(model=str(request.getfixturevalue(name)), names=(name,), dtype="float32") for name in MODELS]
    models = ServedModels.load(configs)
    with running(models, ServerConfig(api_keys=(KEY,), indexes=indexes)) as address:
        yield models, address


@pytest.fixture(scope="session")
def indexes(colbert: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The indexes in tests.server.mutations, as the server's settings."""
    folder = tmp_path_factory.mktemp("indexes")
    with Engine(colbert, dtype="float32") as engine:
        for name in INDEXES:
            with PlaidIndex(folder / name, engine) as index:
                index.add(["wheel", "pond", "query"], [*TEXTS, QUERY], [{"year": 1790}, {"year": 1812}, None])
    return tuple(f"{name}={folder / name}" for name in INDEXES)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, unlogged: None) -> Callable[..., tuple[list[ModelConfig], ServerConfig]]:
    """What ``millpond serve`` with some words would serve."""

    def command(*words: object, before: Sequence[str] = ()) -> tuple[list[ModelConfig], ServerConfig]:
        served: list[Any] = []
        with monkeypatch.context() as patch:
            patch.setattr(run, "serve", lambda models, config, ready: served.extend((models, config)))
            patch.setattr(sys, "argv", ["millpond", *before, "serve", *map(str, words)])
            with pytest.raises(SystemExit) as ended:
                main()
        assert ended.value.code in (0, None)
        return served[0], served[1]

    return command


@pytest.fixture
def unlogged() -> Iterator[None]:
    """Restores the configuration of the log."""
    root, ours = logging.getLogger(), logging.getLogger("millpond")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])
    logging.captureWarnings(False)
