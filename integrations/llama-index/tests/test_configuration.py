"""The construction of MillpondEmbedding, and how it is copied, pickled and serialized."""

from __future__ import annotations

from typing import Any

import pytest
from llama_index.core.ingestion.pipeline import get_transformation_hash
from llama_index.core.schema import TextNode
from pydantic import ValidationError

from llama_index.embeddings.millpond import MillpondEmbedding
from millpond import Engine

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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either model_name= .* or engine="),
        ({"model": "a", "model_name": "b"}, "model\n.*not permitted"),
        ({"model_name": "a", "dimension": 64}, "dimension=.* is not available here"),
        ({"model_name": "a", "dimensions": 0}, "greater than 0"),
        ({"model_name": "a", "embed_batch_size": 4096}, "2048"),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        MillpondEmbedding(**options)


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
