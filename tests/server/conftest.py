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
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient
from tests.server.mutations import INDEXES, KEY, MODELS, QUERY, TEXTS
from tests.tiny import Layout, Normalize, Pooling, write_checkpoint
from tests.tiny.heads import (
    write_cross_encoder,
    write_language_model,
    write_m3,
    write_reward,
    write_splade,
    write_stanford,
)
from tests.tiny.hub import STAND_INS

from millpond import Engine
from millpond.cli.app import main
from millpond.late_interaction import PlaidIndex
from millpond.server import ModelConfig, ServedModels, ServerConfig, create_app
from millpond.server.launch import run, sockets
from millpond.server.launch.server import Server

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
    """``app`` on a free port of the loopback device.

    Args:
        app: The application.
        config: Its configuration; the address in it is replaced.
        keep_alive: Seconds that a connection may wait for its client.
    """
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


@pytest.fixture(scope="session")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sentence-transformers embedder: BERT, mean, normalized, 48 wide, 64 tokens."""
    folder = tmp_path_factory.mktemp("server") / "embedder"
    return write_checkpoint(folder, "bert", sentence_transformers=Layout(modules=(Pooling(), Normalize())))


@pytest.fixture(scope="session")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT that reads pairs, with one logit as its score."""
    return write_cross_encoder(tmp_path_factory.mktemp("server") / "cross-encoder")


@pytest.fixture(scope="session")
def colbert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ColBERT: queries of 12 tokens, documents of 24."""
    return write_stanford(tmp_path_factory.mktemp("server") / "colbert")


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT with three classes."""
    return write_checkpoint(tmp_path_factory.mktemp("server") / "classifier", "bert", head="SequenceClassification")


@pytest.fixture(scope="session")
def sparse_embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SPLADE checkpoint."""
    return write_splade(tmp_path_factory.mktemp("server") / "sparse-embedder")


@pytest.fixture(scope="session")
def token_classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT with three classes for each token."""
    return write_checkpoint(tmp_path_factory.mktemp("server") / "token-classifier", "bert", head="TokenClassification")


@pytest.fixture(scope="session")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A process reward model: two columns at each <extra_0>; with a chat template."""
    return write_reward(tmp_path_factory.mktemp("server") / "reward-model", "Qwen2ForProcessRewardModel")


@pytest.fixture(scope="session")
def outcome_reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model of one number a text; with a chat template."""
    return write_reward(tmp_path_factory.mktemp("server") / "outcome-reward", "InternLM2ForRewardModel")


@pytest.fixture(scope="session")
def bge_m3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BGE-M3: dense, sparse and late-interaction vectors of one checkpoint."""
    return write_m3(tmp_path_factory.mktemp("server") / "bge-m3")


@pytest.fixture(scope="session")
def llm_reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A language model that answers yes or no about a pair, recognized by its folder's name."""
    name = "Qwen/Qwen3-Reranker-0.6B"
    return STAND_INS[name](tmp_path_factory.mktemp("server") / name.rpartition("/")[2])


@pytest.fixture(scope="session")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generative Qwen3 that embeds by its last token; its chat template supports tools."""
    folder = tmp_path_factory.mktemp("server") / "llm"
    write_language_model(folder, "qwen3", ("<|im_start|>", "<|im_end|>"))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def prompted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Matryoshka embedder with prompts for queries and documents; the latter is its default."""
    layout = Layout(
        modules=(Pooling(), Normalize()),
        prompts={"query": "find: ", "document": "keep: "},
        default_prompt_name="document",
    )
    folder = tmp_path_factory.mktemp("server") / "prompted"
    return write_checkpoint(folder, "bert", sentence_transformers=layout, config={"matryoshka_dimensions": [16, 32]})


@pytest.fixture(scope="session")
def pool(
    embedder: Path,
    prompted: Path,
    colbert: Path,
    classifier: Path,
    token_classifier: Path,
    reward_model: Path,
    llm: Path,
) -> Iterator[tuple[ServedModels, TestClient]]:
    """The models of one server, each named after its fixture, and its client."""
    folders = {
        "embedder": embedder,
        "prompted": prompted,
        "colbert": colbert,
        "classifier": classifier,
        "token_classifier": token_classifier,
        "reward_model": reward_model,
        "llm": llm,
    }
    models = ServedModels.load(
        [ModelConfig(model=str(folder), names=(name,), dtype="float32") for name, folder in folders.items()]
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
