"""millpond's classes in the parts of LangChain that take embeddings, retrievers and stores."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_classic.retrievers import EnsembleRetriever
from langchain_core.documents import Document
from langchain_core.indexing import InMemoryRecordManager, aindex, index
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_qdrant import QdrantVectorStore

from langchain_millpond import MillpondColBERTRetriever, MillpondEmbeddings
from millpond import Engine
from millpond.late_interaction import MemoryIndex

QUESTION = "What makes dough rise?"


@pytest.fixture
def embeddings(engine: Engine) -> MillpondEmbeddings:
    return MillpondEmbeddings(engine=engine)


# Vector stores


async def test_the_vector_store_in_memory_ranks_as_numpy_does(
    embeddings: MillpondEmbeddings, texts: list[str], tmp_path: Path
) -> None:
    rows, query = np.array(embeddings.embed_documents(texts)), np.array(embeddings.embed_query(QUESTION))
    order = np.argsort(-(rows @ query))
    store = InMemoryVectorStore(embeddings)
    ids = [f"id-{number}" for number in range(len(texts))]
    assert store.add_texts(texts[:6], ids=ids[:6]) == ids[:6]
    assert await store.aadd_texts(texts[6:], ids=ids[6:]) == ids[6:]
    store.add_texts(texts, ids=ids)  # the same again
    for hits in (
        store.similarity_search_with_score(QUESTION, k=20),
        await store.asimilarity_search_with_score(QUESTION, k=20),
    ):
        assert [document.id for document, _ in hits] == [ids[number] for number in order]
        np.testing.assert_allclose([score for _, score in hits], (rows @ query)[order], atol=1e-5)
    diverse = store.as_retriever(search_type="mmr", search_kwargs={"k": 3, "fetch_k": 12})
    assert (await diverse.ainvoke(QUESTION))[0].id == diverse.invoke(QUESTION)[0].id == ids[order[0]]
    store.dump(str(tmp_path / "store.json"))
    again = InMemoryVectorStore.load(str(tmp_path / "store.json"), embeddings)
    assert again.similarity_search(QUESTION, k=1)[0].id == ids[order[0]]


async def test_the_indexing_api_adds_skips_changes_and_deletes(
    embeddings: MillpondEmbeddings, texts: list[str]
) -> None:
    documents = [Document(page_content=text, metadata={"source": str(n)}) for n, text in enumerate(texts)]

    def key(document: Document) -> str:  # qdrant takes ids that are UUIDs
        return str(uuid.uuid5(uuid.NAMESPACE_URL, f"{document.metadata['source']} {document.page_content}"))

    options: dict[str, Any] = {"cleanup": "full", "source_id_key": "source", "key_encoder": key}
    store = QdrantVectorStore.from_texts([], embeddings, location=":memory:")
    for number, run in enumerate((lambda *a, **o: asyncio.to_thread(index, *a, **o), aindex)):
        records = InMemoryRecordManager(namespace=f"docs-{number}")
        await records.acreate_schema()

        async def counts(found: list[Document], records: Any = records, run: Any = run) -> tuple[int, ...]:
            result = await run(found, records, store, **options)
            return tuple(result[name] for name in ("num_added", "num_skipped", "num_updated", "num_deleted"))

        assert await counts(documents) == (12, 0, 0, 0)
        assert await counts(documents) == (0, 12, 0, 0)
        changed = [Document(page_content="Yeast makes dough rise.", metadata={"source": "2"}), *documents[3:]]
        assert await counts(changed) == (1, 9, 0, 3)
        assert store.client.count(store.collection_name).count == 10
        assert store.similarity_search(QUESTION, k=1)[0].page_content == "Yeast makes dough rise."
        assert await counts([]) == (0, 0, 0, 10)


# Retrievers


async def test_an_ensemble_fuses_dense_and_late_interaction(
    engine: Engine, embeddings: MillpondEmbeddings, texts: list[str]
) -> None:
    documents = [Document(page_content=text, id=f"doc-{n}") for n, text in enumerate(texts)]
    store = InMemoryVectorStore(embeddings)
    store.add_documents(documents)
    dense = store.as_retriever(search_kwargs={"k": 6})
    colbert = MillpondColBERTRetriever.from_documents(documents, index=MemoryIndex(engine), k=6)
    ensemble = EnsembleRetriever(retrievers=[dense, colbert], weights=[0.5, 0.5])
    total: dict[str, float] = {}
    for retriever in (dense, colbert):
        for rank, document in enumerate(retriever.invoke(QUESTION), start=1):
            total[document.page_content] = total.get(document.page_content, 0) + 0.5 / (rank + 60)
    for found in (ensemble.invoke(QUESTION), await ensemble.ainvoke(QUESTION)):
        scores = [total[document.page_content] for document in found]
        assert len(found) == len(total)
        assert scores == sorted(scores, reverse=True)
        assert found[0].page_content.startswith("Bread rises")


# Transformers of documents, which are in packages that are not required


def test_the_semantic_chunker_splits_between_subjects(embeddings: MillpondEmbeddings) -> None:
    chunker = pytest.importorskip("langchain_experimental.text_splitter").SemanticChunker
    text = (
        "Bread rises because of yeast. Yeast turns sugar into gas. The gas makes the dough rise. "
        "A zip archive holds compressed files. Python reads a zip archive with zipfile. Archives can be encrypted."
    )
    chunks = chunker(embeddings, breakpoint_threshold_type="percentile").split_text(text)
    assert len(chunks) == 2
    assert chunks[1].startswith("A zip archive")
