"""The vectors of MillpondEmbeddings and MillpondSparseEmbeddings are the engine's, in the types that stores expect."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_milvus.utils.sparse import BaseSparseEmbedding
from langchain_qdrant import SparseEmbeddings, SparseVector
from pydantic import BaseModel, ConfigDict

import langchain_millpond
from langchain_millpond import MillpondEmbeddings, MillpondSparseEmbeddings
from millpond import Engine
from millpond.errors import UnsupportedTaskError

WORDS = ["stone", "wheel", "river", "bread and yeast", "the mill pond feeds the wheel", "heart, lung, bone"]
STORES: tuple[Any, ...] = ("qdrant", "milvus")


@pytest.mark.parametrize("prompt", ["ask: ", ""])
def test_prompts_of_the_caller_win(prompted: str, engine: Engine, prompt: str) -> None:
    embeddings = MillpondEmbeddings(model=prompted, dtype="float32", query_prompt=prompt, document_prompt=prompt)
    expected = engine.embed(["tides"], prompt=prompt).embeddings
    np.testing.assert_allclose(embeddings.embed_documents(["tides"]), expected, atol=1e-6)
    np.testing.assert_allclose(embeddings.embed_query("tides"), expected[0], atol=1e-6)


def test_options_reach_the_engine(minilm: str, engine: Engine, texts: list[str]) -> None:
    full = engine.embed(texts, normalize=False).embeddings
    raw = MillpondEmbeddings(engine=engine, normalize=False).embed_documents(texts)
    np.testing.assert_allclose(raw, full, atol=1e-6)
    cut = MillpondEmbeddings(model=minilm, dtype="float32", dimensions=64, hf_overrides={"is_matryoshka": True})
    expected = full[:, :64] / np.linalg.norm(full[:, :64], axis=1, keepdims=True)
    np.testing.assert_allclose(cut.embed_documents(texts), expected, atol=1e-6)


def test_texts_are_embedded_as_they_are(minilm: str, tmp_path: Path) -> None:
    text = " two\nlines,  two spaces\t"
    vectors = MillpondEmbeddings(model=minilm, dtype="float32", cache=str(tmp_path / "c.db")).embed_documents([text])
    assert {type(number) for number in vectors[0]} == {float}
    # Cache keys depend on the exact characters, so a hit shows which text reached the engine.
    with Engine(minilm, dtype="float32", cache=tmp_path / "c.db") as engine:
        seen = engine.embed([text, text.replace("\n", " "), text.strip()], role="document").cached
    assert seen.tolist() == [True, False, False]


# Sparse vectors


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
    again = pickle.loads(pickle.dumps(MillpondSparseEmbeddings(model="a", store="milvus")))
    assert isinstance(again, BaseSparseEmbedding)

    class Settings(BaseModel):
        """As a user's own pydantic class would hold them."""

        model_config = ConfigDict(arbitrary_types_allowed=True)

        sparse: SparseEmbeddings
        vector: SparseVector

    assert Settings(sparse=qdrant, vector=qdrant.embed_query("a")).sparse is qdrant


@pytest.mark.parametrize("store", STORES)
def test_roles_give_the_checkpoints_prompts_and_prompts_of_the_caller_win(
    store: Any, prompted_splade: str, splade_engine: Engine
) -> None:
    sparse = MillpondSparseEmbeddings(model=prompted_splade, dtype="float32", store=store)
    by_prompt = {
        prompt: splade_engine.sparse_embed([prompt + "bread rises"]).embeddings
        for prompt in ("ask: ", "passage: ", "own: ", "")
    }
    assert len({tuple(rows[0].items()) for rows in by_prompt.values()}) == 4
    assert_same([sparse.embed_query("bread rises")], by_prompt["ask: "])
    assert_same(sparse.embed_documents(["bread rises"]), by_prompt["passage: "])
    for prompt in ("own: ", ""):
        chosen = sparse.model_copy(update={"query_prompt": prompt, "document_prompt": prompt})
        assert_same([chosen.embed_query("bread rises")], by_prompt[prompt])
        assert_same(asyncio.run(chosen.aembed_documents(["bread rises"])), by_prompt[prompt])


def test_bge_m3_gives_dense_and_sparse_vectors_from_one_engine(m3: str) -> None:
    dense, sparse = MillpondEmbeddings(model=m3, dtype="float32"), MillpondSparseEmbeddings(model=m3, dtype="float32")
    assert len(dense.embed_query("the mill")) == 48
    assert sparse._engine() is dense._engine()
    expected = dense._engine().sparse_embed(WORDS, role="document").embeddings
    for store in STORES:  # special tokens have no weight, and an empty text has no others
        empty, *full = MillpondSparseEmbeddings(model=m3, dtype="float32", store=store).embed_documents(["", *WORDS])
        assert as_dict(empty) == {} and any(map(as_dict, full))
        assert_same(full, expected)


def test_a_model_without_sparse_vectors_is_refused(engine: Engine) -> None:
    with pytest.raises(UnsupportedTaskError, match="sparse_embed"):
        MillpondSparseEmbeddings(engine=engine).embed_query("a")


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
    with pytest.raises(AttributeError, match="has no attribute 'MillpondSparse'"):
        _ = langchain_millpond.MillpondSparse
    assert set(dir(langchain_millpond)) == set(langchain_millpond.__all__)


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
