"""The sparse adapters: the engine's weights by role, in the types of langchain-qdrant and langchain-milvus."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from typing import Any

import pytest
from langchain_milvus.utils.sparse import BaseSparseEmbedding
from langchain_qdrant import SparseEmbeddings, SparseVector
from pydantic import BaseModel, ConfigDict
from tests.gates import LoopGate, batches_held, batches_through, until_set

from langchain_millpond import MillpondEmbeddings, MillpondSparseEmbeddings
from millpond import Engine
from millpond.errors import InputTooLongError, InvalidRequestError, ModelLoadError, UnsupportedTaskError

TEXTS = ["the mill pond feeds the wheel", "bread rises because of yeast", "", "tides " * 200]
WORDS = ["stone", "wheel", "river", "bread and yeast", "the mill pond feeds the wheel", "heart, lung, bone"]
STORES: tuple[Any, ...] = ("qdrant", "milvus")


def as_dict(vector: Any) -> dict[int, float]:
    return vector if isinstance(vector, dict) else dict(zip(vector.indices, vector.values, strict=True))


def assert_same(found: list[Any], expected: list[dict[int, float]]) -> None:
    assert len(found) == len(expected)
    for vector, weights in zip(found, expected, strict=True):
        row = as_dict(vector)
        assert {type(key) for key in row} <= {int}
        assert {type(value) for value in row.values()} <= {float}
        assert row == pytest.approx(weights, abs=1e-5)


def test_classes_and_types_are_those_that_the_stores_check(splade_engine: Engine) -> None:
    qdrant = MillpondSparseEmbeddings(engine=splade_engine)
    milvus = MillpondSparseEmbeddings(engine=splade_engine, store="milvus")
    assert isinstance(qdrant, SparseEmbeddings)
    assert isinstance(milvus, BaseSparseEmbedding)
    assert type(qdrant.embed_query("a")) is SparseVector
    assert {type(vector) for vector in qdrant.embed_documents(["a", "b"])} == {SparseVector}
    assert type(milvus.embed_query("a")) is dict
    assert isinstance(
        pickle.loads(pickle.dumps(MillpondSparseEmbeddings(model="a", store="milvus"))), BaseSparseEmbedding
    )

    class Settings(BaseModel):
        """As a user's own pydantic class would hold them."""

        model_config = ConfigDict(arbitrary_types_allowed=True)

        sparse: SparseEmbeddings
        vector: SparseVector

    assert Settings(sparse=qdrant, vector=qdrant.embed_query("a")).sparse is qdrant


@pytest.mark.parametrize("store", STORES)
def test_roles_give_the_checkpoints_prompts_and_prompts_of_the_caller_win(store: Any, prompted_splade: str) -> None:
    sparse = MillpondSparseEmbeddings(model=prompted_splade, dtype="float32", store=store)
    engine = sparse._engine()
    text = "bread rises"
    by_prompt = {
        prompt: engine.sparse_embed([prompt + text]).embeddings for prompt in ("ask: ", "passage: ", "own: ", "")
    }
    assert len({tuple(rows[0].items()) for rows in by_prompt.values()}) == 4
    assert_same([sparse.embed_query(text)], by_prompt["ask: "])
    assert_same(sparse.embed_documents([text]), by_prompt["passage: "])
    for prompt in ("own: ", ""):
        chosen = sparse.model_copy(update={"query_prompt": prompt, "document_prompt": prompt})
        assert_same([chosen.embed_query(text), asyncio.run(chosen.aembed_query(text))], by_prompt[prompt] * 2)
        assert_same(chosen.embed_documents([text]), by_prompt[prompt])
        assert_same(asyncio.run(chosen.aembed_documents([text])), by_prompt[prompt])


def test_bge_m3_gives_dense_and_sparse_vectors_from_one_engine(m3: str) -> None:
    options: dict[str, Any] = {"model": m3, "dtype": "float32"}
    dense, sparse = MillpondEmbeddings(**options), MillpondSparseEmbeddings(**options)
    assert len(dense.embed_query("the mill")) == 48
    assert sparse._engine() is dense._engine()
    expected = dense._engine().sparse_embed(WORDS, role="document").embeddings
    assert any(expected)
    assert_same(sparse.embed_documents(WORDS), expected)


def test_a_text_without_weights_has_an_empty_vector(m3: str) -> None:
    """BGE-M3 gives special tokens no weight, and an empty text has no others."""
    for store in STORES:
        sparse = MillpondSparseEmbeddings(model=m3, dtype="float32", store=store)
        empty, *full = sparse.embed_documents(["", *WORDS])
        assert as_dict(empty) == {}
        assert any(map(as_dict, full))


def test_a_long_text_is_cut_or_refused_as_told(splade: str) -> None:
    options: dict[str, Any] = {"model": splade, "dtype": "float32", "max_length": 8}
    long = "mill " * 20 + "bread"
    end = MillpondSparseEmbeddings(**options).embed_query(long)
    assert as_dict(end) == pytest.approx(
        as_dict(MillpondSparseEmbeddings(**options).embed_query("mill " * 20)), abs=1e-5
    )
    assert as_dict(end) != as_dict(MillpondSparseEmbeddings(**options, truncate="start").embed_query(long))
    with pytest.raises(InputTooLongError, match="max_length=8"):
        MillpondSparseEmbeddings(**options, truncate="error").embed_documents(["short", long])


@pytest.mark.parametrize(
    ("texts", "error", "message"),
    [
        ("one text", TypeError, "not a str"),
        (["a", None], InvalidRequestError, "index 1 is a NoneType"),
        (["a", "\ud800"], InvalidRequestError, "index 1 holds a lone surrogate"),
    ],
    ids=["str", "none", "surrogate"],
)
def test_bad_texts_are_named(splade_engine: Engine, texts: Any, error: type[Exception], message: str) -> None:
    sparse = MillpondSparseEmbeddings(engine=splade_engine)
    with pytest.raises(error, match=message):
        sparse.embed_documents(texts)
    with pytest.raises(error, match=message):
        asyncio.run(sparse.aembed_documents(texts))


def test_a_model_without_sparse_vectors_is_refused(minilm: str) -> None:
    with pytest.raises(UnsupportedTaskError, match="sparse_embed"):
        MillpondSparseEmbeddings(model=minilm, dtype="float32").embed_query("a")
    with pytest.raises(ModelLoadError, match="no-such-folder"):
        MillpondSparseEmbeddings(model="./no-such-folder").embed_query("a")


_WITHOUT = """
import sys, types
for name in ("langchain_qdrant", "langchain_milvus"):
    sys.modules[name] = None  # as if it were not installed
import asyncio, pickle
from langchain_millpond import MillpondSparseEmbeddings
assert "torch" not in sys.modules
sparse = MillpondSparseEmbeddings(model=sys.argv[1], dtype="float32")
vector = sparse.embed_query("bread")
assert vector.indices and len(vector.indices) == len(vector.values), vector
assert vector == asyncio.run(sparse.aembed_query("bread")) == pickle.loads(pickle.dumps(vector))
row = MillpondSparseEmbeddings(model=sys.argv[1], dtype="float32", store="milvus").embed_documents(["bread"])[0]
assert row == dict(zip(vector.indices, vector.values))
print(type(vector).__module__)
"""


@pytest.mark.contract
def test_neither_store_is_required(splade: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _WITHOUT, splade], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "langchain_millpond.sparse"


@pytest.mark.contract
def test_the_package_imports_no_store_and_no_torch() -> None:
    program = (
        "import sys, langchain_millpond as package; package.MillpondEmbeddings(model='a'); "
        "package.MillpondReranker(model='a'); print(*sys.modules); "
        "package.MillpondSparseEmbeddings(model='a'); print(*sys.modules)"
    )
    before, after = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert not {"langchain_qdrant", "langchain_milvus", "qdrant_client", "pymilvus", "torch"} & set(before.split())
    assert "langchain_qdrant" in after.split()
    assert not {"langchain_milvus", "torch"} & set(after.split())


def test_an_unknown_name_of_the_package_is_an_error() -> None:
    import langchain_millpond

    with pytest.raises(AttributeError, match="has no attribute 'MillpondSparse'"):
        _ = langchain_millpond.MillpondSparse
    assert set(dir(langchain_millpond)) == set(langchain_millpond.__all__)


async def test_async_neither_blocks_the_loop_nor_takes_a_thread(
    splade_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the adapter took a thread of the loop's pool")

    monkeypatch.setattr(asyncio.get_running_loop(), "run_in_executor", refuse)
    sparse = MillpondSparseEmbeddings(engine=splade_engine)
    many = [f"the mill pond {number}" for number in range(300)]
    gate = LoopGate()
    with batches_through(gate, splade_engine):
        assert len(await gate.run(sparse.aembed_documents(many))) == 300
        await gate.run(sparse.aembed_query(many[0]))
    assert gate.calls
    assert not gate.blocked

    async def blocks() -> Any:
        return sparse.embed_documents(many[:4])

    gate = LoopGate(seconds=0.2)
    with batches_through(gate, splade_engine):
        await gate.run(blocks())
    assert gate.blocked  # the gate detects a blocked loop


async def test_the_loop_turns_while_many_vectors_are_made(
    splade_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, made_at = 0, []

    def made(*_: Any) -> None:
        made_at.append(turns)

    monkeypatch.setattr(MillpondSparseEmbeddings, "_vector", made)

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    ticker = asyncio.ensure_future(count())
    await MillpondSparseEmbeddings(engine=splade_engine).aembed_documents(["mill"] * 1000)
    ticker.cancel()
    assert len(made_at) == 1000
    assert max(made_at.count(turn) for turn in set(made_at)) <= 64


async def test_a_cancelled_call_leaves_the_engine_working(splade_engine: Engine) -> None:
    sparse = MillpondSparseEmbeddings(engine=splade_engine)
    with batches_held(splade_engine) as due:
        call = asyncio.ensure_future(sparse.aembed_documents([f"the mill {number}" for number in range(1000)]))
        await until_set(due)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert_same([await sparse.aembed_query("bread")], splade_engine.sparse_embed(["bread"], role="query").embeddings)
