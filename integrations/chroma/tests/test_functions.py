"""The embedding functions in Chroma's own collections: reopened with the same model, and refused with another."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import chromadb
import numpy as np
import pytest
from chromadb.api.types import Schema, SparseVectorIndexConfig
from chromadb.utils.embedding_functions import config_to_embedding_function, known_embedding_functions
from tests.adapter_models import prompted as prompted
from tests.adapter_models import prompted_splade as prompted_splade
from tests.adapter_models import splade_engine as splade_engine
from tests.passages import TEXTS

from millpond import Engine, FingerprintMismatchError
from millpond.errors import InvalidRequestError, ModelLoadError
from millpond_chroma import MillpondEmbeddingFunction, MillpondSparseEmbeddingFunction, open_collection

pytestmark = pytest.mark.door

QUESTION = "What makes dough rise?"
IDS = [f"d{n}" for n in range(len(TEXTS))]


@pytest.fixture
def client(tmp_path: Path) -> Any:
    client = chromadb.PersistentClient(tmp_path / "chroma")
    yield client
    client.close()


def test_documents_and_queries_have_their_roles(client: Any, prompted: str) -> None:
    function = MillpondEmbeddingFunction(prompted, dtype="float32")
    collection = client.create_collection("docs", embedding_function=function)
    assert collection.configuration_json["hnsw"]["space"] == "cosine"
    collection.add(ids=IDS, documents=TEXTS)
    with Engine(prompted, dtype="float32") as engine:
        rows = {role: engine.embed(TEXTS, role=role).embeddings for role in ("document", "query")}
        (question,) = engine.embed([QUESTION], role="query").embeddings
    stored = collection.get(ids=IDS, include=["embeddings"])
    places = [stored["ids"].index(each) for each in IDS]
    np.testing.assert_allclose(stored["embeddings"][places], rows["document"], atol=1e-5)
    assert np.abs(stored["embeddings"][places] - rows["query"]).max() > 1e-3  # the other role
    found = collection.query(query_texts=[QUESTION], n_results=3)
    cosines = rows["document"] @ question
    assert found["ids"][0] == [IDS[n] for n in np.argsort(-cosines)[:3]]
    assert found["distances"][0] == pytest.approx(1 - np.sort(cosines)[:-4:-1], abs=1e-5)


def test_the_space_is_that_of_the_checkpoint(minilm: str, tmp_path: Path) -> None:
    for similarity, space in (("cosine", "cosine"), ("dot", "ip"), ("euclidean", "l2")):
        folder = tmp_path / similarity
        folder.mkdir()
        for entry in Path(minilm).iterdir():
            if entry.name != "config_sentence_transformers.json":
                (folder / entry.name).symlink_to(entry)
        (folder / "config_sentence_transformers.json").write_text(f'{{"similarity_fn_name": "{similarity}"}}')
        assert MillpondEmbeddingFunction(str(folder)).default_space() == space


REOPEN = """
import sys, chromadb
from millpond_chroma import MillpondEmbeddingFunction
collection = chromadb.PersistentClient(sys.argv[1]).get_collection("docs")
print(collection.query(query_texts=[sys.argv[2]], n_results=1)["ids"][0][0])
"""


def test_another_process_reopens_a_collection_with_its_model(minilm: str, tmp_path: Path) -> None:
    place = str(tmp_path / "chroma")
    client = chromadb.PersistentClient(place)
    function = MillpondEmbeddingFunction(minilm, dtype="float32", query_prompt="query: ", device="cpu")
    client.create_collection("docs", embedding_function=function).add(ids=IDS, documents=TEXTS)
    client.close()
    run = subprocess.run([sys.executable, "-c", REOPEN, place, QUESTION], capture_output=True, text=True, timeout=120)
    assert (run.returncode, run.stdout.strip()) == (0, "d2"), run.stderr
    client = chromadb.PersistentClient(place)
    again = client.get_collection("docs").configuration["embedding_function"]
    assert isinstance(again, MillpondEmbeddingFunction) and again.get_config() == function.get_config()
    assert again._source.query_prompt == "query: " and "device" not in again.get_config()  # the machine's own
    client.close()


def copied(minilm: str, folder: Path) -> Path:
    shutil.copytree(minilm, folder)
    return folder


def test_a_collection_refuses_another_model(client: Any, minilm: str, prompted: str, tmp_path: Path) -> None:
    function = MillpondEmbeddingFunction(minilm, dtype="float32")
    open_collection(client, "docs", function, metadata={"of": "mills"}).add(ids=IDS, documents=TEXTS)
    again = open_collection(client, "docs", function)
    assert again.count() == len(TEXTS) and again.metadata == {"of": "mills"}

    moved = MillpondEmbeddingFunction(str(copied(minilm, tmp_path / "moved")), device="cpu", max_batch_tokens=512)
    assert open_collection(client, "docs", moved).query(query_texts=[QUESTION], n_results=1)["ids"] == [["d2"]]
    again.modify(configuration={"embedding_function": moved})  # the same model in another place
    assert client.get_collection("docs").configuration_json["embedding_function"]["config"]["model"].endswith("moved")

    other = MillpondEmbeddingFunction(prompted, dtype="float32")
    prefixed = MillpondEmbeddingFunction(minilm, dtype="float32", document_prompt="passage: ")
    for refused, message in (
        (other, "the collection was built by .*two models do not compare. Use .*, or another collection"),
        (prefixed, "built with document_prompt=None, and this function has document_prompt='passage: '"),
    ):
        with pytest.raises(FingerprintMismatchError, match=message):
            open_collection(client, "docs", refused)
    with pytest.raises(FingerprintMismatchError, match="document_prompt"):  # Chroma has stored it by then
        client.get_collection("docs").modify(configuration={"embedding_function": prefixed})
    client.create_collection("foreign", embedding_function=None)
    with pytest.raises(InvalidRequestError, match="'foreign' has the embedding function None, not 'millpond'"):
        open_collection(client, "foreign", function)


def test_files_that_changed_are_refused_when_a_collection_is_asked(client: Any, minilm: str, tmp_path: Path) -> None:
    folder = copied(minilm, tmp_path / "model")
    function = MillpondEmbeddingFunction(str(folder), dtype="float32")
    client.create_collection("docs", embedding_function=function).add(ids=IDS, documents=TEXTS)
    config = function.get_config()
    function._source.load().close()
    settings = folder / "sentence_bert_config.json"
    settings.write_text(settings.read_text().replace("256", "128"))
    with pytest.raises(ValueError, match=r"max_length=256.*and this engine is .*max_length=128"):
        client.get_collection("docs").query(query_texts=[QUESTION])
    with pytest.raises(FingerprintMismatchError, match="or another collection"):
        MillpondEmbeddingFunction.build_from_config(config)
    shutil.rmtree(folder)
    with pytest.raises(ValueError, match="Could not build embedding function millpond"):
        client.get_collection("docs").query(query_texts=[QUESTION])


def test_a_function_over_an_engine_is_stored_by_its_model(client: Any, minilm: str) -> None:
    engine = Engine(minilm, pooling="cls")
    function = MillpondEmbeddingFunction(engine=engine)
    config = client.create_collection("docs", embedding_function=function).configuration_json["embedding_function"]
    assert config["name"] == "millpond" and config["config"]["model"] == minilm
    assert config["config"]["identity"]["fingerprint"] == engine.spec.fingerprint
    with pytest.raises(FingerprintMismatchError, match="pooling='cls'"):  # which the name alone has not
        config_to_embedding_function(config)
    engine.close()


def test_a_wrong_model_or_option_is_an_error_at_once(minilm: str) -> None:
    assert known_embedding_functions["millpond"] is MillpondEmbeddingFunction
    with pytest.raises(ModelLoadError, match="no-such-folder"):
        MillpondEmbeddingFunction("./no-such-folder")
    for options, message in (({"backend": "onnx"}, "backend='onnx'"), ({"truncate_dim": "x"}, "dimensions")):
        with pytest.raises(ValueError, match=message):
            MillpondEmbeddingFunction(minilm, **options)
        with pytest.raises(ValueError, match=message):
            MillpondEmbeddingFunction.validate_config({"model": minilm, **options})
    MillpondEmbeddingFunction.validate_config(MillpondEmbeddingFunction(minilm).get_config())
    with pytest.raises(TypeError, match="whatever"):
        MillpondEmbeddingFunction.validate_config({"model": minilm, "identity": {"whatever": 1}})


def test_the_sparse_twin_weighs_by_role_and_is_stored_in_a_schema(prompted_splade: str, splade_engine: Engine) -> None:
    function = MillpondSparseEmbeddingFunction(prompted_splade, dtype="float32")
    expected = {role: splade_engine.sparse_embed(TEXTS, role=role) for role in ("document", "query")}
    assert expected["document"][0] != expected["query"][0]
    for role, rows in (("document", function(TEXTS)), ("query", function.embed_query(TEXTS))):
        for row, weights in zip(rows, expected[role], strict=True):
            assert dict(zip(row.indices, row.values, strict=True)) == pytest.approx(weights, abs=1e-5)
            assert row.indices == sorted(row.indices)
    schema = Schema()
    schema.create_index(SparseVectorIndexConfig(embedding_function=function, source_key="#document"), key="sparse")
    read = Schema.deserialize_from_json(schema.serialize_to_json()).keys["sparse"].sparse_vector
    assert read is not None and read.sparse_vector_index is not None
    again = read.sparse_vector_index.config.embedding_function
    assert isinstance(again, MillpondSparseEmbeddingFunction) and again.get_config() == function.get_config()
