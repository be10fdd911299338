"""MillpondTransform in an IngestionPipeline: kills, broken nodes, upserts, processes."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_index.core import Document
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.instrumentation.events.embedding import EmbeddingEndEvent, EmbeddingStartEvent
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.vector_stores.qdrant import QdrantVectorStore
from pydantic import ValidationError
from qdrant_client import QdrantClient

from llama_index.embeddings.millpond import MillpondEmbedding, MillpondTransform
from millpond import Engine
from millpond.errors import DeviceLostError, InvalidDimensionsError, InvalidRequestError
from millpond.ingest import Record, Rejected, point_id, read

Run = Callable[[MillpondTransform, Sequence[BaseNode]], list[BaseNode]]
LONG = "tides " * 600  # MiniLM reads 256 tokens


@pytest.fixture
def options(minilm: str, tmp_path: Path) -> dict[str, Any]:
    return {"model_name": minilm, "dtype": "float32", "cache": tmp_path / "vectors.db", "truncate": "error"}


@pytest.fixture(params=["run", "arun"])
def run(request: pytest.FixtureRequest) -> Run:
    """A pipeline of a transform alone, in both styles."""

    def call(transform: MillpondTransform, nodes: Sequence[BaseNode]) -> list[BaseNode]:
        pipeline = IngestionPipeline(transformations=[transform], disable_cache=True)
        if request.param == "run":
            return list(pipeline.run(nodes=nodes))
        return list(asyncio.run(pipeline.arun(nodes=nodes)))

    return call


def computed(transform: MillpondEmbedding) -> int:
    """Texts that the engine has computed."""
    return transform._engine().stats().batch_texts


def nodes_of(texts: Sequence[str]) -> list[BaseNode]:
    return [TextNode(id_=f"n{number}", text=text) for number, text in enumerate(texts)]


def vectors_of(nodes: Sequence[BaseNode]) -> list[Any]:
    return [node.embedding for node in nodes]


def fail(monkeypatch: pytest.MonkeyPatch, raising: Callable[[list[str]], None]) -> None:
    """Run a function on the texts of each call of the engine, in both styles."""
    embed, aembed = MillpondTransform._get_text_embeddings, MillpondTransform._aget_text_embeddings

    def sync_call(self: MillpondTransform, texts: list[str]) -> list[Any]:
        raising(texts)
        return embed(self, texts)

    async def async_call(self: MillpondTransform, texts: list[str]) -> list[Any]:
        raising(texts)
        return await aembed(self, texts)

    monkeypatch.setattr(MillpondTransform, "_get_text_embeddings", sync_call)
    monkeypatch.setattr(MillpondTransform, "_aget_text_embeddings", async_call)


def test_the_vectors_are_the_embeddings_and_every_batch_has_its_events(
    options: dict[str, Any], engine: Engine, run: Run, texts: list[str], recorder: Any
) -> None:
    found = run(MillpondTransform(**options, embed_batch_size=5), nodes_of(texts))
    assert [node.node_id for node in found] == [f"n{number}" for number in range(len(texts))]
    np.testing.assert_allclose(vectors_of(found), engine.embed(texts, role="document").embeddings, atol=1e-5)
    assert [len(end.chunks) for end in recorder.of(EmbeddingEndEvent)] == [5, 5, 2]
    assert len(recorder.of(EmbeddingStartEvent)) == 3


def test_one_more_node_computes_one(options: dict[str, Any], run: Run, texts: list[str]) -> None:
    transform = MillpondTransform(**options)
    counts = []
    for size in (4, 4, 5):
        before = computed(transform)
        run(transform, nodes_of(texts[:size]))
        counts.append(computed(transform) - before)
    assert counts == [4, 0, 1]


def test_a_broken_node_is_named_when_all_others_are_in_the_cache(
    options: dict[str, Any], run: Run, texts: list[str]
) -> None:
    transform = MillpondTransform(**options, embed_batch_size=8)
    nodes = nodes_of([*texts[:3], LONG, *texts[3:]])
    with pytest.raises(InvalidRequestError, match=r"1 of 13 nodes cannot be embedded \('n3': .*tokens"):
        run(transform, nodes)
    assert computed(transform) >= len(texts)
    before = computed(transform)
    mended = run(transform, nodes_of([*texts[:3], "Tides follow the moon, twice a day.", *texts[3:]]))
    assert len(mended) == 13 and None not in vectors_of(mended)
    assert computed(transform) - before == 1


def test_nothing_is_stored_of_a_run_that_names_a_broken_node(options: dict[str, Any], texts: list[str]) -> None:
    store, docstore = SimpleVectorStore(), SimpleDocumentStore()
    pipeline = IngestionPipeline(transformations=[MillpondTransform(**options)], vector_store=store, docstore=docstore)
    documents = [Document(text=text, doc_id=f"d{number}") for number, text in enumerate([*texts[:3], LONG])]
    with pytest.raises(InvalidRequestError, match="'d3'"):
        pipeline.run(documents=documents)
    assert not store.data.embedding_dict and not docstore.docs
    documents[3] = Document(text="Tides follow the moon.", doc_id="d3")
    assert len(pipeline.run(documents=documents)) == 4 == len(docstore.docs)


@pytest.mark.parametrize("broken", [LONG, "half of a pair: \ud83d"], ids=["too long", "lone surrogate"])
def test_a_broken_node_becomes_a_dead_letter(
    options: dict[str, Any], run: Run, texts: list[str], tmp_path: Path, broken: str, caplog: Any
) -> None:
    letters = tmp_path / "dead.jsonl"
    transform = MillpondTransform(**options, dead_letters=letters)
    nodes = nodes_of([*texts[:3], broken, *texts[3:]])
    nodes[3].metadata = {"page": 3}
    found = run(transform, nodes)
    assert [node.node_id for node in found] == [node.node_id for node in nodes if node.node_id != "n3"]
    assert None not in vectors_of(found) and nodes[3].embedding is None
    assert "1 of 13 nodes cannot be embedded" in caplog.text and str(letters) in caplog.text
    (letter,) = read(letters)
    if broken is LONG:
        assert letter == Record("n3", LONG, {"page": 3})
    else:
        assert isinstance(letter, Rejected) and letter.content is not None
        assert '"page": 3' in letter.content and "half of a pair" in letter.content
    size = letters.stat().st_size
    before = computed(transform)
    run(transform, nodes)
    assert letters.stat().st_size == size
    assert computed(transform) - before <= 2  # probes


@pytest.mark.parametrize("count", [1, 12])
def test_wrong_options_and_a_broken_engine_are_no_fault_of_the_nodes(
    options: dict[str, Any], run: Run, texts: list[str], tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    letters = tmp_path / "dead.jsonl"
    with pytest.raises(InvalidDimensionsError):
        run(MillpondTransform(**options, dead_letters=letters, dimensions=99), nodes_of(texts[:count]))

    def broken(texts: list[str]) -> None:
        raise RuntimeError("no memory")

    fail(monkeypatch, broken)
    with pytest.raises(RuntimeError, match="no memory"):
        run(MillpondTransform(**options, dead_letters=letters), nodes_of(texts[:count]))
    assert not letters.exists()


def test_a_forward_that_fails_for_one_text_costs_the_others_nothing(
    options: dict[str, Any], run: Run, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poisoned(given: list[str]) -> None:
        if "poison" in given:
            raise RuntimeError("this forward fails")

    fail(monkeypatch, poisoned)
    transform = MillpondTransform(**options, dead_letters=tmp_path / "dead.jsonl")
    assert len(run(transform, nodes_of([*texts, "poison", "poison"]))) == len(texts)
    assert [letter.id for letter in read(tmp_path / "dead.jsonl") if isinstance(letter, Record)] == ["n12", "n13"]


def test_a_lost_device_is_no_fault_of_the_node(
    options: dict[str, Any], run: Run, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = [2]

    def lose(given: list[str]) -> None:
        if texts[0] in given and losses[0]:
            losses[0] -= 1
            raise DeviceLostError("cuda:0 is lost")

    fail(monkeypatch, lose)
    assert len(run(MillpondTransform(**options), nodes_of(texts[:2]))) == 2
    assert losses == [0]


def test_a_vector_without_a_direction_is_not_stored(
    options: dict[str, Any], texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    embed = MillpondTransform._get_text_embeddings

    def zeroed(self: MillpondTransform, given: list[str]) -> list[Any]:
        return [
            [0.0] * len(row) if text == texts[1] else row for text, row in zip(given, embed(self, given), strict=True)
        ]

    monkeypatch.setattr(MillpondTransform, "_get_text_embeddings", zeroed)
    with pytest.raises(InvalidRequestError, match=r"1 of 3 .*'n1': its vector is not finite, or all zero"):
        MillpondTransform(**options)(nodes_of(texts[:3]))


def test_a_node_that_no_model_can_read_is_left_out(options: dict[str, Any], run: Run, caplog: Any) -> None:
    nodes: list[BaseNode] = [
        TextNode(id_="text", text="Tides follow the moon."),
        TextNode(id_="blank", text=" \u200b\n"),
        TextNode(id_="metadata", text="", metadata={"title": "Tides"}),
    ]
    assert [node.node_id for node in run(MillpondTransform(**options), nodes)] == ["text", "metadata"]
    assert "1 of 3 nodes are blank" in caplog.text


def test_an_empty_run_loads_no_model(run: Run, tmp_path: Path) -> None:
    assert run(MillpondTransform("./no-such-folder", cache=tmp_path / "vectors.db"), []) == []


def test_without_a_cache_there_is_no_guarantee(minilm: str, engine: Engine) -> None:
    for options in ({"model_name": minilm}, {"engine": engine}):
        with pytest.raises(ValidationError, match="MillpondTransform needs cache="):
            MillpondTransform(**options)


def test_a_file_that_holds_no_dead_letters_is_refused_before_anything_is_embedded(
    options: dict[str, Any], run: Run, tmp_path: Path
) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("mine\n")
    with pytest.raises(InvalidRequestError, match="not a dead letter"):
        run(MillpondTransform(**{**options, "model_name": "./no-such-folder"}, dead_letters=other), nodes_of(["tides"]))


def test_it_is_written_and_pickled_whole(options: dict[str, Any], tmp_path: Path, texts: list[str]) -> None:
    built = MillpondTransform(**options, dead_letters=tmp_path / "dead.jsonl", document_prompt="passage: ")
    expected = vectors_of(built(nodes_of(texts[:2])))  # the engine is loaded, and has locks
    for again in (pickle.loads(pickle.dumps(built)), MillpondTransform.from_dict(built.to_dict())):
        assert again.to_dict() == built.to_dict()
        before = computed(again)
        assert vectors_of(again(nodes_of(texts[:2]))) == expected
        assert computed(again) == before


def test_upserts_embed_what_changed(options: dict[str, Any], texts: list[str]) -> None:
    transform = MillpondTransform(**options)
    pipeline = IngestionPipeline(
        transformations=[transform],
        vector_store=SimpleVectorStore(),
        docstore=SimpleDocumentStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS,
    )
    documents = [Document(text=text, doc_id=f"d{number}") for number, text in enumerate(texts)]
    counts = []
    for changed in (None, None, "Salt lowers the freezing point of water."):
        if changed:
            documents[2] = Document(text=changed, doc_id="d2")
        before = computed(transform)
        counts.append((len(pipeline.run(documents=documents)), computed(transform) - before))
    assert counts == [(12, 12), (0, 0), (1, 1)]


@pytest.mark.filterwarnings("ignore:Payload indexes have no effect in the local Qdrant")
@pytest.mark.parametrize("stable", [True, False])
def test_a_lost_docstore_doubles_no_node_whose_id_is_stable(
    options: dict[str, Any], texts: list[str], stable: bool
) -> None:
    client = QdrantClient(":memory:")
    ids = {"id_func": lambda number, document: point_id(document.id_, number)} if stable else {}
    for _ in range(2):
        IngestionPipeline(
            transformations=[SentenceSplitter(**ids), MillpondTransform(**options)],
            vector_store=QdrantVectorStore("docs", client=client),
            docstore=SimpleDocumentStore(),
        ).run(documents=[Document(text=text, doc_id=f"d{number}") for number, text in enumerate(texts)])
    assert client.count("docs").count == (12 if stable else 24)


_PIPELINE = """
import sys
from llama_index.core import Document
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.embeddings.millpond import MillpondTransform
from llama_index.vector_stores.qdrant import QdrantVectorStore
from millpond.ingest import point_id
from qdrant_client import QdrantClient


def main() -> None:
    model, folder, workers = sys.argv[1:]
    client = QdrantClient(path=f"{folder}/qdrant")
    transform = MillpondTransform(model, dtype="float32", cache=f"{folder}/vectors.db")
    # Two nodes of a document; characters are counted.
    splitter = SentenceSplitter(
        chunk_size=64,
        chunk_overlap=0,
        tokenizer=list,
        id_func=lambda number, document: point_id(document.id_, number),
    )
    pipeline = IngestionPipeline(
        transformations=[transform] if int(workers) else [splitter, transform],  # a lambda goes to no process
        vector_store=QdrantVectorStore("docs", client=client),
        docstore=SimpleDocumentStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS,
        disable_cache=True,
    )
    documents = [
        Document(
            text=f"The tide of day {n} is as high as the pier. The moon of night {n} is nearly full now.",
            doc_id=point_id(str(n)),
        )
        for n in range(40 if int(workers) else 600)
    ]
    nodes = pipeline.run(documents=documents, num_workers=int(workers) or None)
    print(len(nodes), transform._engine().stats().batch_texts, client.count("docs").count)


if __name__ == "__main__":
    main()
"""


def start(folder: Path, model: str, workers: int = 0) -> subprocess.Popen[str]:
    script = folder / "pipeline.py"
    script.write_text(_PIPELINE)
    command = [sys.executable, "-W", "ignore", str(script), model, str(folder), str(workers)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)


def finished(process: subprocess.Popen[str]) -> list[int]:
    """Nodes, computed texts, and points in the database."""
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return [int(word) for word in out.split()]


def stored(folder: Path) -> int:
    """Vectors in the cache's file."""
    try:
        with closing(sqlite3.connect(f"file:{folder / 'vectors.db'}?mode=ro", uri=True)) as connection:
            return int(connection.execute("SELECT count(*) FROM rows").fetchone()[0])
    except sqlite3.OperationalError:  # not made yet
        return 0


@pytest.mark.contract
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no kill -9 on this system")
def test_after_kill_9_the_same_run_computes_the_rest_and_stores_no_node_twice(minilm: str, tmp_path: Path) -> None:
    child = start(tmp_path, minilm)
    while stored(tmp_path) < 200 and child.poll() is None:
        time.sleep(0.005)
    child.kill()
    assert child.wait() == -signal.SIGKILL
    child.communicate()
    kept = stored(tmp_path)
    assert 200 <= kept < 1200
    assert finished(start(tmp_path, minilm)) == [1200, 1200 - kept, 1200]
    # The docstore of the process is lost, too: the nodes are written again under the same ids, and nothing is computed.
    assert finished(start(tmp_path, minilm)) == [1200, 0, 1200]


@pytest.mark.contract
@pytest.mark.slow
def test_worker_processes_fill_the_same_cache(minilm: str, tmp_path: Path) -> None:
    assert finished(start(tmp_path, minilm, workers=2)) == [40, 0, 40]  # the workers have engines of their own
    assert stored(tmp_path) == 40
