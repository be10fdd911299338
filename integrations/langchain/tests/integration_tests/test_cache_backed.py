"""LangChain's CacheBackedEmbeddings over a MillpondByteStore, and how millpond's own cache differs from it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_classic.embeddings import CacheBackedEmbeddings

from langchain_millpond import MillpondByteStore, MillpondEmbeddings
from millpond import Engine


class Counted(MillpondEmbeddings):
    """Real embeddings that record which documents reached the model."""

    asked: list[list[str]]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.asked.append(list(texts))
        return super().embed_documents(texts)

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        self.asked.append(list(texts))
        return await super().aembed_documents(texts)


@pytest.fixture
def embeddings(engine: Engine) -> Counted:
    return Counted(engine=engine, asked=[])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "bytes.db"


@pytest.fixture
def store(path: Path) -> Iterator[MillpondByteStore]:
    with MillpondByteStore(path) as store:
        yield store


def cached(embeddings: MillpondEmbeddings, store: MillpondByteStore, **options: Any) -> CacheBackedEmbeddings:
    return CacheBackedEmbeddings.from_bytes_store(
        embeddings, store, **{"namespace": "minilm/", "key_encoder": "blake2b", **options}
    )


@pytest.mark.parametrize("batch_size", [None, 1, 5])
async def test_a_text_is_computed_once(
    embeddings: Counted, store: MillpondByteStore, path: Path, texts: list[str], batch_size: int | None
) -> None:
    expected = embeddings.embed_documents(texts)
    embeddings.asked.clear()
    first = cached(embeddings, store, batch_size=batch_size)
    np.testing.assert_allclose(first.embed_documents(texts[:7]), expected[:7], atol=1e-6)
    np.testing.assert_allclose(await first.aembed_documents(texts), expected, atol=1e-6)
    with MillpondByteStore(path) as other:  # as another process would
        np.testing.assert_allclose(cached(embeddings, other).embed_documents(texts), expected, atol=1e-6)
    assert sorted(text for asked in embeddings.asked for text in asked) == sorted(texts)
    assert len(list(store.yield_keys(prefix="minilm/"))) == len(texts)


async def test_queries_have_a_store_of_their_own(embeddings: Counted, prompted: str, tmp_path: Path) -> None:
    """Also an empty one: CacheBackedEmbeddings takes a store that is false for none."""
    model = MillpondEmbeddings(model=prompted, dtype="float32")
    with MillpondByteStore(tmp_path / "documents") as documents, MillpondByteStore(tmp_path / "queries") as queries:
        both = cached(model, documents, query_embedding_cache=queries)
        (document,), query = both.embed_documents(["tides"]), both.embed_query("tides")
        assert len(list(queries.yield_keys())) == len(list(documents.yield_keys())) == 1
        assert np.abs(np.array(document) - query).max() > 1e-3
        assert (await both.aembed_query("tides"), await both.aembed_documents(["tides"])) == (query, [document])


def test_a_damaged_value_is_computed_again(embeddings: Counted, path: Path, texts: list[str]) -> None:
    with MillpondByteStore(path) as store:
        expected = cached(embeddings, store).embed_documents(texts)
    value = json.dumps(expected[3]).encode()[:200]
    content = path.read_bytes()
    assert value in content
    path.write_bytes(content.replace(value, b"[" + b"9" * 199))  # still JSON: only the checksum tells
    embeddings.asked.clear()
    with MillpondByteStore(path) as store:
        np.testing.assert_allclose(cached(embeddings, store).embed_documents(texts), expected, atol=1e-5)
        assert embeddings.asked == [[texts[3]]]
        cached(embeddings, store).embed_documents(texts)
        assert embeddings.asked == [[texts[3]]]


_EMBED = """
import sys
from langchain_classic.embeddings import CacheBackedEmbeddings
from langchain_millpond import MillpondByteStore, MillpondEmbeddings
model, path = sys.argv[1:]
cached = CacheBackedEmbeddings.from_bytes_store(
    MillpondEmbeddings(model=model, dtype="float32"), MillpondByteStore(path), key_encoder="blake2b", batch_size=4
)
for number in range(1_000_000):
    cached.embed_documents([f"text {number} {part}" for part in range(4)])
    print(number, flush=True)
"""


def test_a_killed_run_goes_on_where_it_was(embeddings: Counted, minilm: str, path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _EMBED, minilm, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for _ in range(5):
        last = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    process.stdout.close()
    done = [f"text {number} {part}" for number in range(last + 1) for part in range(4)]
    with MillpondByteStore(path) as store:
        resumed = cached(embeddings, store, namespace="")
        vectors = resumed.embed_documents([*done, "a new text"])
        assert embeddings.asked == [["a new text"]]
    np.testing.assert_allclose(vectors, embeddings.embed_documents([*done, "a new text"]), atol=1e-5)


# integrations.md 1.3: what CacheBackedEmbeddings does, and what `cache=` does instead


def test_own_cache_embeds_duplicates_once(embeddings: Counted, engine: Engine, store: MillpondByteStore) -> None:
    """Theirs passes every copy to the model; the engine computes it once."""
    cached(embeddings, store).embed_documents(["a", "a", "b"])
    assert embeddings.asked == [["a", "a", "b"]]
    before = engine.stats()
    embeddings.embed_documents(["one twice", "one twice", "another"])
    assert engine.stats().batch_texts - before.batch_texts == 2


def test_own_cache_tells_widths_and_roles_apart(prompted: str, store: MillpondByteStore, tmp_path: Path) -> None:
    """Theirs returns another width than asked for, and a document's vector for a query."""
    options: dict[str, Any] = {"model": prompted, "dtype": "float32", "hf_overrides": {"is_matryoshka": True}}
    wide, narrow = MillpondEmbeddings(**options), MillpondEmbeddings(**options, dimensions=64)
    theirs = [cached(model, store, query_embedding_cache=True) for model in (wide, narrow)]
    assert [len(model.embed_documents(["tides"])[0]) for model in theirs] == [384, 384]
    assert theirs[0].embed_query("tides") == theirs[0].embed_documents(["tides"])[0]
    ours = [model.model_copy(update={"cache": str(tmp_path / "vectors")}) for model in (wide, narrow)]
    assert [len(model.embed_documents(["tides"])[0]) for model in ours] == [384, 64]
    assert np.abs(np.array(ours[0].embed_query("tides")) - ours[0].embed_documents(["tides"])[0]).max() > 1e-3
    assert ours[1]._engine().embed(["tides"], role="document").cached.all()  # one row serves both widths
    ours[0]._engine().close()


def test_own_cache_takes_a_fifth_of_the_bytes(minilm: str, tmp_path: Path, texts: list[str]) -> None:
    with MillpondByteStore(tmp_path / "theirs") as store:
        model = MillpondEmbeddings(model=minilm, dtype="float32", cache=str(tmp_path / "ours"))
        cached(model, store).embed_documents(texts)
        sizes = [len(value) for value in store.mget(list(store.yield_keys())) if value is not None]
        assert min(sizes) > 4 * 384 * 4  # bytes of JSON for 384 float32
        assert model._engine().cache is not None
        assert model._engine().cache.widths() == {384: len(texts)}
        model._engine().close()
