"""The snippets of tutorials, and how few of their lines have to change: both versions run and give the same results.

RAGatouille, LangGraph, rank_bm25 and LlamaIndex's packages for fastembed and ColBERT are not installed for the tests.
"""

from __future__ import annotations

import gc
import importlib.util
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.compat import hub_cache
from tests.compat.hub_cache import WRITERS, HubCache, write_onnx
from tests.compat.migration_page import assert_same, plain

pytestmark = pytest.mark.contract

INPUTS = """
texts = ["Tides follow the moon.", "Bread rises because of yeast.", "A wheel turns in the water of the pond."]
question = "What makes dough rise?"
"""
RESULTS = ("vectors", "query_vector", "again", "hits", "counts")
STORE = "from langchain_core.vectorstores import InMemoryVectorStore\n"
DOCUMENTS = """from langchain_core.documents import Document
documents = [Document(page_content=text, id=str(n), metadata={"n": n}) for n, text in enumerate(texts)]
"""
HUGGING_FACE = """from langchain_huggingface import HuggingFaceEmbeddings
embeddings = HuggingFaceEmbeddings(model_name="all-MiniLM-L6-v2")
"""
# Old line: new line. `dtype` is for the comparison to the last digits.
MILLPOND = {
    "from langchain_huggingface import HuggingFaceEmbeddings": "from langchain_millpond import MillpondEmbeddings",
    'embeddings = HuggingFaceEmbeddings(model_name="all-MiniLM-L6-v2")': (
        'embeddings = MillpondEmbeddings(model_name="all-MiniLM-L6-v2", dtype="float32")'
    ),
}
BGE = "from langchain_community.embeddings import HuggingFaceBgeEmbeddings"
FASTEMBED = "from langchain_community.embeddings import FastEmbedEmbeddings"
FLASHRANK = ("ms-marco-MiniLM-L-12-v2", "flashrank-MiniLM-L-12-v2_Q.onnx")
RERANK = "from llama_index.core.postprocessor import SentenceTransformerRerank"


@dataclass(frozen=True, kw_only=True)
class Snippet:
    """A tutorial's code, and the lines that change."""

    name: str
    old: str
    changes: dict[str, str]
    needs: tuple[str, ...] = field(default=("langchain_huggingface", "sentence_transformers"))

    @property
    def new(self) -> str:
        lines = self.old.splitlines()
        assert [line for line in self.changes if line not in lines] == []
        return "\n".join(self.changes.get(line, line) for line in lines)


def langchain(name: str, code: str, *needs: str) -> Snippet:
    """A snippet over LangChain's embeddings, of which two lines change."""
    return Snippet(
        name=name,
        old=HUGGING_FACE + code,
        changes=MILLPOND,
        needs=("langchain_huggingface", "sentence_transformers", *needs),
    )


SNIPPETS = [
    langchain(
        "HuggingFaceEmbeddings",
        "vectors = embeddings.embed_documents(texts)\nquery_vector = embeddings.embed_query(question)\n",
    ),
    Snippet(
        name="HuggingFaceBgeEmbeddings",
        old=f"""{BGE}
embeddings = HuggingFaceBgeEmbeddings(
    model_name="BAAI/bge-small-en-v1.5",
    model_kwargs={{"device": "cpu"}},
    encode_kwargs={{"normalize_embeddings": True}},
)
vectors = embeddings.embed_documents(texts)
query_vector = embeddings.embed_query(question)
""",
        changes={
            BGE: "from langchain_millpond import MillpondBgeEmbeddings as HuggingFaceBgeEmbeddings",
            '    model_kwargs={"device": "cpu"},': '    model_kwargs={"device": "cpu"}, dtype="float32",',
        },
        needs=("langchain_community", "sentence_transformers"),
    ),
    Snippet(
        name="FastEmbedEmbeddings",
        old=f"""{FASTEMBED}
embeddings = FastEmbedEmbeddings(
    model_name="sentence-transformers/all-MiniLM-L6-v2", threads=1, parallel=None, doc_embed_type="passage"
)
vectors = embeddings.embed_documents(texts)
query_vector = embeddings.embed_query(question)
""",
        changes={
            FASTEMBED: "from functools import partial\nfrom langchain_millpond import MillpondEmbeddings\n"
            'FastEmbedEmbeddings = partial(MillpondEmbeddings, dtype="float32")'
        },
        needs=("langchain_community", "fastembed", "onnx"),
    ),
    Snippet(
        name="FlashrankRerank",
        old=f'''{DOCUMENTS}from flashrank import Ranker
from langchain_community.document_compressors import FlashrankRerank
compressor = FlashrankRerank(client=Ranker("{FLASHRANK[0]}"), top_n=2)
hits = compressor.compress_documents(documents, question)
''',
        changes={
            "from flashrank import Ranker": "",
            "from langchain_community.document_compressors import FlashrankRerank": (
                "from langchain_millpond import MillpondReranker"
            ),
            f'compressor = FlashrankRerank(client=Ranker("{FLASHRANK[0]}"), top_n=2)': (
                'compressor = MillpondReranker(model="ms-marco-MiniLM-L12-v2", top_n=2, activation="sigmoid", '
                'dtype="float32")'
            ),
        },
        needs=("langchain_community", "flashrank", "onnx"),
    ),
    Snippet(
        name="LlamaIndex: HuggingFaceEmbedding",
        old="""from llama_index.embeddings.huggingface import HuggingFaceEmbedding
embed_model = HuggingFaceEmbedding(model_name="sentence-transformers/all-MiniLM-L6-v2")
from llama_index.core import Document, VectorStoreIndex
index = VectorStoreIndex.from_documents([Document(text=text) for text in texts], embed_model=embed_model)
hits = index.as_retriever(similarity_top_k=2).retrieve(question)
vectors = embed_model.get_text_embedding_batch(texts)
""",
        changes={
            "from llama_index.embeddings.huggingface import HuggingFaceEmbedding": (
                "from llama_index.embeddings.millpond import MillpondEmbedding"
            ),
            'embed_model = HuggingFaceEmbedding(model_name="sentence-transformers/all-MiniLM-L6-v2")': (
                'embed_model = MillpondEmbedding(model_name="all-MiniLM-L6-v2", dtype="float32")'
            ),
        },
        needs=("llama_index.embeddings.huggingface", "sentence_transformers"),
    ),
    Snippet(
        name="LlamaIndex: SentenceTransformerRerank",
        old=f"""from llama_index.core.schema import NodeWithScore, TextNode
{RERANK}
nodes = [NodeWithScore(node=TextNode(text=text), score=0.5) for text in texts]
reranker = SentenceTransformerRerank(model="cross-encoder/ms-marco-MiniLM-L6-v2", top_n=2)
hits = reranker.postprocess_nodes(nodes, query_str=question)
""",
        changes={
            RERANK: "from functools import partial\n"
            "from llama_index.postprocessor.millpond_rerank import MillpondRerank\n"
            'SentenceTransformerRerank = partial(MillpondRerank, dtype="float32")'
        },
        needs=("llama_index.core", "sentence_transformers"),
    ),
    langchain(
        "Qdrant",
        f"""{DOCUMENTS}from langchain_qdrant import QdrantVectorStore
from uuid import UUID
ids = [str(UUID(int=n)) for n in range(3)]
store = QdrantVectorStore.from_documents(documents, embeddings, location=":memory:", ids=ids)
hits = [(found.page_content, score) for found, score in store.similarity_search_with_score(question, k=3)]
""",
        "langchain_qdrant",
    ),
    langchain(
        "ParentDocumentRetriever",
        f"""{STORE}{DOCUMENTS}from langchain_classic.retrievers import ParentDocumentRetriever
from langchain_classic.storage import InMemoryStore
from langchain_text_splitters import CharacterTextSplitter
splitter = CharacterTextSplitter(separator=" ", chunk_size=20, chunk_overlap=0)
retriever = ParentDocumentRetriever(
    vectorstore=InMemoryVectorStore(embeddings), docstore=InMemoryStore(), child_splitter=splitter
)
retriever.add_documents(documents)
hits = retriever.invoke(question)
""",
        "langchain_classic",
    ),
    langchain(
        "EnsembleRetriever",
        f"""{STORE}{DOCUMENTS}from langchain_classic.retrievers import EnsembleRetriever
one = InMemoryVectorStore.from_documents(documents, embeddings).as_retriever(search_kwargs={{"k": 2}})
other = InMemoryVectorStore.from_documents(documents[1:], embeddings).as_retriever(search_kwargs={{"k": 1}})
hits = EnsembleRetriever(retrievers=[one, other], weights=[0.4, 0.6]).invoke(question)
""",
        "langchain_classic",
    ),
    langchain(
        "CacheBackedEmbeddings",
        """from langchain_classic.embeddings import CacheBackedEmbeddings
from langchain_classic.storage import InMemoryByteStore
stored = CacheBackedEmbeddings.from_bytes_store(
    embeddings, InMemoryByteStore(), namespace=embeddings.model_name, key_encoder="sha256"
)
vectors = stored.embed_documents(texts)
again = stored.embed_documents(texts)
""",
        "langchain_classic",
    ),
    langchain(
        "the indexing API",
        f"""{STORE}{DOCUMENTS}from langchain_core.indexing import InMemoryRecordManager, index
store, records = InMemoryVectorStore(embeddings), InMemoryRecordManager(namespace="docs")
records.create_schema()
counts = [
    index(documents, records, store, cleanup="incremental", source_id_key="n", key_encoder="sha256")["num_added"]
    for _ in range(2)
]
hits = [(found.page_content, score) for found, score in store.similarity_search_with_score(question, k=2)]
""",
    ),
    langchain(
        "a node of a graph",
        f"""{STORE}{DOCUMENTS}retriever = InMemoryVectorStore.from_documents(documents, embeddings).as_retriever()
def retrieve(state):
    return {{"context": [document.page_content for document in retriever.invoke(state["question"])]}}
hits = retrieve({{"question": question}})["context"]
""",
    ),
]


@pytest.fixture
def hub(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubCache:
    """Hub ids lead to this cache in every library, and files go to a folder of the test."""
    from huggingface_hub import constants

    cache = HubCache(tmp_path_factory.mktemp("hub"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache.folder))
    for name in ("HF_HUB_CACHE", "FASTEMBED_CACHE_PATH", "LLAMA_INDEX_CACHE_DIR"):
        monkeypatch.setenv(name, str(cache.folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    return cache


def prepare(snippet: Snippet, hub: HubCache, monkeypatch: pytest.MonkeyPatch) -> None:
    code = snippet.old + snippet.new
    for name in WRITERS:
        if f'{name.split("/")[1]}"' in code:
            hub.add(name)
    if FASTEMBED in snippet.old:
        hub.add_onnx(hub_cache.MINILM, "Qdrant/all-MiniLM-L6-v2-onnx", hub_cache.token_states, "model.onnx")
    if FLASHRANK[0] in code:
        source = hub.add("cross-encoder/ms-marco-MiniLM-L12-v2")
        write_onnx(source, Path(FLASHRANK[0]), hub_cache.logits(source), FLASHRANK[1])
        from flashrank import Ranker

        monkeypatch.setattr(Ranker.__init__, "__defaults__", (FLASHRANK[0], ".", 512, "INFO"))


def run(code: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(INPUTS + code, "snippet", "exec"), namespace)
    return {
        name: plain(namespace[name])
        for name in ("vectors", "query_vector", "again", "hits", "counts")
        if name in namespace
    }


def is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of its parent
        return False


@pytest.mark.parametrize("snippet", [pytest.param(each, id=each.name) for each in SNIPPETS])
def test_the_tutorials_lines_change_and_its_results_do_not(
    snippet: Snippet, hub: HubCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = [name for name in snippet.needs if not is_installed(name)]
    if missing:
        pytest.skip(f"{', '.join(missing)}: pip install --no-deps -r tests/compat/replaced.txt")
    with warnings.catch_warnings():  # the replaced libraries warn, and leave sockets open
        warnings.simplefilter("ignore")
        prepare(snippet, hub, monkeypatch)
        old = run(snippet.old)
        gc.collect()
        new = run(snippet.new)
    difference = max((_difference(old[name], new[name]) for name in old), default=0.0)
    print(f"{snippet.name}: {len(snippet.changes)} lines change, the results by at most {difference:.1e}")  # pytest -rP
    assert old.keys() == new.keys() and old
    assert_same(old, new, tolerance=1e-5)
    assert len(snippet.changes) <= 3


def _difference(old: Any, new: Any) -> float:
    """The largest difference of two numbers at the same place."""
    if isinstance(old, list | tuple):
        return max((_difference(one, other) for one, other in zip(old, new, strict=True)), default=0.0)
    if isinstance(old, float | np.ndarray) and new is not None:
        return float(np.abs(np.subtract(old, new)).max())
    return 0.0
