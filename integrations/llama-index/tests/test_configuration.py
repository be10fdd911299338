"""The construction of MillpondEmbedding, and how it is copied, pickled and serialized."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.callbacks import CallbackManager
from llama_index.core.ingestion.pipeline import get_transformation_hash
from llama_index.core.schema import TextNode
from pydantic import ValidationError

from llama_index.embeddings.millpond import MillpondEmbedding
from llama_index.postprocessor.millpond_rerank import MillpondRerank
from millpond import AsyncEngine, Engine
from millpond.config import EngineConfig
from millpond.errors import ModelLoadError

# One value for each option that changes vectors.
CHANGES = {
    "query_prompt": "ask: ",
    "document_prompt": "passage: ",
    "dimensions": 64,
    "normalize": False,
    "truncate": "start",
    "revision": "v1",
    "device": "cpu",
    "dtype": "float32",
    "max_length": 8,
    "pooling": "cls",
    "hf_overrides": {"is_matryoshka": True},
    "query_prompt_name": "query",
    "document_prompt_name": "query",
    "long_texts": "mean",
    "quantization": "int8",
    "compile": True,
}


def test_class() -> None:
    assert issubclass(MillpondEmbedding, BaseEmbedding)
    assert MillpondEmbedding.class_name() == "MillpondEmbedding"
    plain = MillpondEmbedding(model_name="a")
    assert plain.embed_batch_size == 2048
    # The concurrent calls of one embedding fill only a part of an engine's queue.
    assert plain.embed_batch_size * (plain.num_workers or 1) < EngineConfig(model="a").max_queue / 4


def test_model_is_accepted_too(tmp_path: Path) -> None:
    assert MillpondEmbedding.model_validate({"model": "owner/name"}).model_name == "owner/name"
    assert MillpondEmbedding.model_validate({"model_name": tmp_path, "cache": tmp_path / "c"}).cache == f"{tmp_path}/c"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either model_name= .* or engine="),
        ({"model": "a", "model_name": "b"}, "model\n.*not permitted"),
        ({"model_name": "a", "dimension": 64}, "dimension\n.*not permitted"),
        ({"model_name": "a", "dimensions": 0}, "greater than 0"),
        ({"model_name": "a", "embed_batch_size": 4096}, "2048"),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        MillpondEmbedding(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_name": "a"}, "not both"),
        ({"dtype": "float32"}, "dtype= is read when a model is loaded"),
        ({"cache": "vectors"}, "cache= is read when a model is loaded"),
    ],
)
def test_an_engine_excludes_what_loading_reads(engine: Engine, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        MillpondEmbedding(engine=engine, **options)
    assert MillpondEmbedding(engine=engine, device="auto", dimensions=384).model_name == engine.spec.name


def test_an_engine_is_an_engine() -> None:
    with pytest.raises(TypeError, match="must be a millpond.Engine, not a str"):
        MillpondEmbedding.model_validate({"engine": "owner/name"})


async def test_an_async_engine_is_its_engine(engine: Engine) -> None:
    assert MillpondRerank(engine=AsyncEngine(engine)).engine is engine
    embedding = MillpondEmbedding(engine=AsyncEngine(engine))
    assert embedding.engine is engine
    assert embedding.get_query_embedding("a") == await embedding.aget_query_embedding("a")


def test_nothing_is_loaded_until_a_text_comes() -> None:
    embedding = MillpondEmbedding(model_name="./no-such-folder")
    with pytest.raises(ModelLoadError, match="no-such-folder"):
        embedding.get_query_embedding("a")


def test_the_import_costs_no_torch() -> None:
    program = (
        "import sys; from llama_index.embeddings.millpond import MillpondEmbedding as M; M(model_name='a'); "
        "print(*sys.modules)"
    )
    modules = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "llama_index.embeddings.millpond.base" in modules
    assert "torch" not in modules


@pytest.mark.parametrize("journey", ["pickle", "copy", "deepcopy", "dict", "json"])
def test_a_copied_or_pickled_embedding_gives_the_same_vectors(minilm: str, journey: str) -> None:
    built = MillpondEmbedding(
        model_name=minilm,
        dtype="float32",
        query_prompt="ask: ",
        dimensions=64,
        hf_overrides={"is_matryoshka": True},
        embed_batch_size=7,
    )
    before = built.get_query_embedding("tides")
    journeys = {
        "pickle": lambda: pickle.loads(pickle.dumps(built)),
        "copy": lambda: copy.copy(built),
        "deepcopy": lambda: copy.deepcopy(built),
        "dict": lambda: MillpondEmbedding.from_dict(built.to_dict()),
        "json": lambda: MillpondEmbedding.from_json(built.to_json()),
    }
    after = journeys[journey]()
    assert after.to_dict() == built.to_dict()
    assert after.get_query_embedding("tides") == before
    assert built.model_copy(update={"query_prompt": None}).get_query_embedding("tides") != before


def test_pickling_drops_nothing(minilm: str, quiet: pytest.LogCaptureFixture) -> None:
    built = MillpondEmbedding(model_name=minilm, dtype="float32", callback_manager=CallbackManager([]))
    pickle.dumps(built)
    assert not quiet.records


def test_an_engine_travels_with_copies_and_with_nothing_else(engine: Engine) -> None:
    built = MillpondEmbedding(engine=engine)
    assert copy.copy(built).engine is engine
    assert copy.deepcopy(built).engine is engine
    with pytest.raises(TypeError, match="engine=.*cannot be pickled.*model_name="):
        pickle.dumps(built)


def test_a_dict_without_its_engine_is_refused(engine: Engine, minilm: str) -> None:
    data = MillpondEmbedding(engine=engine, query_prompt="ask: ").to_dict()
    assert "engine" not in data
    with pytest.raises(ValidationError, match="pass that engine"):
        MillpondEmbedding.from_dict(data)
    assert MillpondEmbedding.from_dict(data, engine=engine).to_dict() == data
    with Engine(minilm, dtype="float32", max_length=8) as other, pytest.raises(ValidationError, match="another engine"):
        MillpondEmbedding.from_dict(data, engine=other)


@pytest.mark.parametrize("name", CHANGES)
def test_a_pipelines_cache_key_sees_every_option_that_changes_vectors(name: str) -> None:
    nodes = [TextNode(text="tides")]
    plain, changed = MillpondEmbedding(model_name="a"), MillpondEmbedding(model_name="a", **{name: CHANGES[name]})
    assert get_transformation_hash(nodes, plain) == get_transformation_hash(nodes, MillpondEmbedding(model_name="a"))
    assert get_transformation_hash(nodes, plain) != get_transformation_hash(nodes, changed)


def test_a_pipelines_cache_key_tells_engines_apart(engine: Engine, minilm: str) -> None:
    nodes = [TextNode(text="tides")]
    with Engine(minilm, dtype="float32", normalize=False) as raw, Engine(minilm, dtype="float32") as same:
        keys = [get_transformation_hash(nodes, MillpondEmbedding(engine=one)) for one in (engine, same, raw)]
    assert keys[0] == keys[1] != keys[2]
