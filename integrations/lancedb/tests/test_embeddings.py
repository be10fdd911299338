"""The registered embedding function in LanceDB's own tables: add, search by a text, and another process."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import pytest
from lancedb.embeddings import EmbeddingFunctionConfig, TextEmbeddingFunction, get_registry
from lancedb.pydantic import LanceModel, Vector
from tests.adapter_models import prompted as prompted
from tests.passages import TEXTS

from millpond import Engine, FingerprintMismatchError
from millpond.errors import InputTooLongError
from millpond_lancedb import MillpondEmbeddings

pytestmark = pytest.mark.contract

QUESTION = "What makes dough rise?"


def created(name: str, **options: Any) -> Any:
    return get_registry().get("millpond").create(name=name, **{"dtype": "float32"} | options)


def schema_of(function: Any) -> Any:
    class Passage(LanceModel):
        text: str = function.SourceField()
        vector: Vector(function.ndims()) = function.VectorField()  # type: ignore[valid-type]

    return Passage


def table_of(place: Path, function: Any, texts: list[str] | None = None) -> Any:
    table = lancedb.connect(place).create_table("docs", schema=schema_of(function))
    table.add([{"text": text} for text in (TEXTS if texts is None else texts)])
    return table


def stored(table: Any) -> dict[str, Any]:
    (function,) = json.loads(table.schema.metadata[b"embedding_functions"])
    return dict(function["model"])


def test_it_is_lancedbs_class_in_lancedbs_registry(minilm: str) -> None:
    function = created(minilm)
    assert type(function) is MillpondEmbeddings and isinstance(function, TextEmbeddingFunction)
    assert (
        function.ndims() == 384 and created(minilm, hf_overrides={"is_matryoshka": True}, dimensions=64).ndims() == 64
    )
    again = pickle.loads(pickle.dumps(function))
    assert again == function and again.compute_query_embeddings(QUESTION)[0].shape == (384,)


def test_rows_and_questions_have_the_vectors_of_their_roles(prompted: str, tmp_path: Path) -> None:
    table = table_of(tmp_path, created(prompted))
    with Engine(prompted, dtype="float32") as engine:
        rows = {role: engine.embed(TEXTS, role=role).embeddings for role in ("document", "query")}
        (question,) = engine.embed([QUESTION], role="query").embeddings
    vectors = np.stack(table.to_arrow()["vector"].to_pylist())
    assert np.abs(vectors - rows["document"]).max() < 1e-5
    assert np.abs(vectors - rows["query"]).max() > 1e-3  # the other role
    hits = table.search(QUESTION).distance_type("cosine").limit(12).to_list()
    cosines = rows["document"] @ question
    assert [hit["text"] for hit in hits] == [TEXTS[n] for n in np.argsort(-cosines)]
    assert [hit["_distance"] for hit in hits] == pytest.approx(1 - np.sort(cosines)[::-1], abs=1e-5)


def test_narrow_vectors(minilm: str, engine: Engine, tmp_path: Path) -> None:
    table = table_of(tmp_path, created(minilm, hf_overrides={"is_matryoshka": True}, dimensions=64, normalize=True))
    expected = engine.embed(TEXTS, role="document", dimensions=64, normalize=True).embeddings
    assert np.abs(np.stack(table.to_arrow()["vector"].to_pylist()) - expected).max() < 1e-5


REOPEN = """
import sys, lancedb
from millpond_lancedb import MillpondEmbeddings
print(lancedb.connect(sys.argv[1]).open_table("docs").search(sys.argv[2]).limit(1).to_list()[0]["text"])
"""


def test_another_process_finds_the_model_with_the_table(
    minilm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(minilm).parent)  # a relative name is stored as a path
    function = created(Path(minilm).name, query_prompt="query: ", device="cpu", max_batch_tokens=2048)
    table = table_of(tmp_path, function)
    kept = stored(table)
    assert kept.pop("identity")["fingerprint"] == function._engine().spec.fingerprint
    assert kept == {"name": minilm, "query_prompt": "query: ", "dtype": "float32"}  # not what is the machine's own
    command = [sys.executable, "-c", REOPEN, str(tmp_path), QUESTION]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (run.returncode, run.stdout.strip()) == (0, TEXTS[2]), run.stderr
    without = [*command[:2], REOPEN.replace("from millpond_lancedb import MillpondEmbeddings\n", ""), *command[3:]]
    run = subprocess.run(without, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert run.returncode == 1 and "KeyError: 'millpond'" in run.stderr  # the import is what registers it


def test_a_table_refuses_another_model(minilm: str, prompted: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(minilm, folder)
    function = created(str(folder))
    table_of(tmp_path, function)
    function._engine().close()
    shutil.rmtree(folder)
    shutil.copytree(prompted, folder)  # another model in its place
    table = lancedb.connect(tmp_path).open_table("docs")
    message = "table of this function was built by .*or another table"
    with pytest.raises(FingerprintMismatchError, match=message):
        table.search(QUESTION)
    with pytest.raises(RuntimeError, match=f"FingerprintMismatchError: {message}"):  # as it comes through LanceDB
        table.add([{"text": "more"}])
    assert table.count_rows() == len(TEXTS)


def test_secrets_are_neither_taken_nor_stored(minilm: str, tmp_path: Path) -> None:
    for name in ("token", "api_key", "use_auth_token"):
        with pytest.raises(ValueError, match=name) as refused:
            created(minilm, **{name: "hf_secret"})
        assert "hf_secret" not in str(refused.value)
    registry = get_registry()
    registry.set_var("folder", minilm)
    registry.set_var("prompt", "private: ")
    table = table_of(tmp_path, created("$var:folder", query_prompt="$var:prompt", device="$var:device:cpu"))
    kept = stored(table)
    assert [kept[name] for name in ("name", "query_prompt", "device")] == [
        "$var:folder",
        "$var:prompt",
        "$var:device:cpu",
    ]
    assert "private" not in json.dumps(kept)
    again = lancedb.connect(tmp_path).open_table("docs").embedding_functions["vector"].function
    assert again._engine() is created(minilm, device="cpu")._engine() and again.query_prompt == "private: "


def test_every_form_of_texts_and_nulls(minilm: str, engine: Engine, tmp_path: Path) -> None:
    function = created(minilm)
    expected = engine.embed(TEXTS[:2], role="document").embeddings
    chunked = pa.chunked_array([[TEXTS[0]], [TEXTS[1]]])
    for texts in (TEXTS[:2], np.array(TEXTS[:2]), pa.array(TEXTS[:2]), chunked):
        assert np.abs(np.stack(function.compute_source_embeddings(texts)) - expected).max() < 1e-5
    (alone,) = function.compute_source_embeddings(TEXTS[0])
    assert np.abs(alone - expected[0]).max() < 1e-5 and alone.dtype == np.float32
    first, null, second = function.compute_source_embeddings([TEXTS[0], None, TEXTS[1]])
    assert null is None and np.abs(np.stack([first, second]) - expected).max() < 1e-5
    assert function.compute_source_embeddings([]) == [] and function.compute_source_embeddings([None]) == [None]
    config = EmbeddingFunctionConfig(source_column="text", vector_column="vector", function=function)
    rows = pa.table({"text": pa.array([TEXTS[0], None])})
    table = lancedb.connect(tmp_path).create_table("nulls", rows, embedding_functions=[config], on_bad_vectors="drop")
    assert table.to_arrow()["text"].to_pylist() == [TEXTS[0]]


def test_a_failure_is_told_at_once(minilm: str, tmp_path: Path) -> None:
    """LanceDB's own functions wait and try again, seven times by default."""
    table = table_of(tmp_path, created(minilm, truncate="error"), ["short"])
    message = "has 602 tokens, more than max_length=256"
    with pytest.raises(InputTooLongError, match=message):
        table.search("word " * 600)
    with pytest.raises(RuntimeError, match=f"InputTooLongError: .*{message}"):
        table.add([{"text": "word " * 600}])
    for options, message in (
        ({"whatever": 1}, "whatever"),
        ({"dimensions": "x"}, "dimensions"),
        ({"name": None}, "name="),
    ):
        with pytest.raises(ValueError, match=message):
            created(**{"name": minilm} | options)


async def test_the_asynchronous_connection(minilm: str, tmp_path: Path) -> None:
    connection = await lancedb.connect_async(tmp_path)
    table = await connection.create_table("docs", schema=schema_of(created(minilm)))
    await table.add([{"text": text} for text in TEXTS])
    found = await (await table.search(QUESTION)).limit(1).to_list()
    assert found[0]["text"] == TEXTS[2]
