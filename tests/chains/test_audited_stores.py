"""An audit of stores that LangChain and LlamaIndex filled, and of vectors by sentence-transformers itself."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.audit.corpus import records as audited_records

from millpond import Engine
from millpond.audit.audit import AuditOptions, audit
from millpond.audit.candidates import Models
from millpond.audit.report import AuditReport
from millpond.ingest import open_sink

pytest.importorskip("millpond_qdrant")

ROWS = audited_records(60)


def look(url: str, *models: str, **options: Any) -> AuditReport:
    settings = {"dtype": "float32", "device": "cpu"}
    with closing(open_sink(url, must_exist=True)) as sink, closing(Models(models, settings=settings)) as opened:
        return audit(sink, opened, AuditOptions(**options))


def test_langchains_stores_are_read(minilm: str, engine: Engine, tmp_path: Path):
    embeddings = pytest.importorskip("langchain_millpond").MillpondEmbeddings(engine=engine)
    qdrant = pytest.importorskip("langchain_qdrant").QdrantVectorStore
    texts, metadatas = [row.text for row in ROWS], [dict(row.metadata) for row in ROWS]
    store = qdrant.from_texts(texts, embeddings, metadatas, path=str(tmp_path / "q"), collection_name="docs")
    store.client.close()
    report = look(f"qdrant+path:{tmp_path}/q#docs", minilm)
    assert report.clean and report.text == "page_content" and report.found.setting is not None
    assert report.found.setting.max_length == 96  # which nobody would try: it is searched for


def test_langchains_milvus_is_read(minilm: str, engine: Engine, tmp_path: Path):
    pytest.importorskip("millpond_milvus")
    embeddings = pytest.importorskip("langchain_millpond").MillpondEmbeddings(engine=engine)
    milvus = pytest.importorskip("langchain_milvus").Milvus
    place = {"connection_args": {"uri": str(tmp_path / "m.db")}, "collection_name": "docs"}
    index = {"index_type": "FLAT", "metric_type": "COSINE"}
    vectors = [row.metadata for row in ROWS]
    milvus.from_texts([row.text for row in ROWS], embeddings, vectors, index_params=index, **place)
    report = look(f"milvus+file:{tmp_path}/m.db#docs", minilm)
    assert report.clean and report.text == "text" and report.vectors.name == "vector"


@pytest.mark.filterwarnings("ignore:Payload indexes have no effect in the local Qdrant")
def test_llama_indexs_nodes_are_read_with_their_metadata(minilm: str, engine: Engine, tmp_path: Path):
    """LlamaIndex embeds a node's metadata before its text; a node whose text was changed behind its back is found."""
    core = pytest.importorskip("llama_index.core")
    store_class = pytest.importorskip("llama_index.vector_stores.qdrant").QdrantVectorStore
    embedding = pytest.importorskip("llama_index.embeddings.millpond").MillpondEmbedding(engine=engine)
    from llama_index.core.schema import TextNode
    from qdrant_client import QdrantClient

    client = QdrantClient(path=str(tmp_path / "q"))
    store = store_class("docs", client=client)
    nodes = [
        TextNode(text=row.text, metadata=dict(row.metadata), id_=f"00000000-0000-0000-0000-{number:012}")
        for number, row in enumerate(ROWS)
    ]
    context = core.StorageContext.from_defaults(vector_store=store)
    core.VectorStoreIndex(nodes, storage_context=context, embed_model=embedding)
    (point,) = client.retrieve("docs", [nodes[7].node_id], with_payload=True)
    node = json.loads(point.payload["_node_content"])
    node["text"] = "Something else by now."
    client.set_payload("docs", {"_node_content": json.dumps(node)}, points=[point.id])
    client.close()
    report = look(f"qdrant+path:{tmp_path}/q#docs", minilm)
    assert report.found.setting is not None and report.found.setting.text == "LlamaIndex's metadata and text"
    assert [(each.id, each.fault) for each in report.findings] == [(nodes[7].node_id, "stale")]


@pytest.mark.torch
@pytest.mark.skipif("MILLPOND_DATA" not in os.environ, reason="MILLPOND_DATA is not set")
def test_what_sentence_transformers_made_of_cranfield(minilm: str, tmp_path: Path):
    """Of 500 abstracts with their titles, embedded by sentence-transformers, half a percent is stale: all are found."""
    library = pytest.importorskip("sentence_transformers")
    from qdrant_client import QdrantClient, models

    lines = (Path(os.environ["MILLPOND_DATA"]) / "cranfield" / "corpus.jsonl").read_text("utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["text"] and row["title"]][:500]
    model = library.SentenceTransformer(minilm, device="cpu")
    vectors = np.asarray(model.encode([f"{row['title']} {row['text']}" for row in rows], batch_size=16))
    stale = {17: 200, 300: 41}
    for index, of in stale.items():
        vectors[index] = np.asarray(model.encode(f"{rows[of]['title']} {rows[of]['text'][:300]}"))
    client = QdrantClient(path=str(tmp_path / "q"))
    client.create_collection("docs", models.VectorParams(size=384, distance=models.Distance.COSINE))
    payloads = [{"title": row["title"], "body": row["text"]} for row in rows]
    client.upload_collection("docs", vectors, payloads, ids=range(len(rows)))
    client.close()
    report = look(f"qdrant+path:{tmp_path}/q#docs", minilm)
    setting = report.found.setting
    assert setting is not None and (setting.pooling, setting.max_length) == ("mean", 256)
    assert setting.text.startswith("title, ") and report.found.level == "float32" and report.text == "body"
    assert {each.id: each.fault for each in report.findings} == {"17": "stale", "300": "stale"}
