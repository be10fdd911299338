"""The construction of MillpondEmbeddings, and how it is copied, pickled and serialized."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from langchain_millpond import MillpondCrossEncoder, MillpondEmbeddings, MillpondReranker
from millpond import AsyncEngine, Engine
from millpond.errors import InvalidDimensionsError, ModelLoadError


def test_model_name_is_accepted_too() -> None:
    by_alias = MillpondEmbeddings.model_validate({"model_name": "owner/name"})
    assert by_alias == MillpondEmbeddings(model="owner/name")
    assert by_alias.model == "owner/name"


def test_a_path_object_becomes_its_text(tmp_path: Path) -> None:
    built = MillpondEmbeddings.model_validate({"model": tmp_path, "cache": tmp_path / "vectors"})
    assert (built.model, built.cache) == (str(tmp_path), str(tmp_path / "vectors"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either model= .* or engine="),
        ({"model": ""}, "at least 1"),
        ({"model": "a", "model_name": "b"}, "model_name"),
        ({"model": "a", "dimension": 64}, "dimension\n.*not permitted"),
        ({"model": "a", "dimensions": 0}, "greater than 0"),
        ({"model": "a", "dimensions": True}, "valid integer"),
        ({"model": "a", "truncate": "middle"}, "'end', 'start' or 'error'"),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        MillpondEmbeddings(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "a"}, "either model= .* or engine="),
        ({"dtype": "float32"}, "dtype= is read when a model is loaded"),
        ({"cache": "vectors"}, "cache= is read when a model is loaded"),
    ],
)
def test_an_engine_excludes_what_loading_reads(engine: Engine, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        MillpondEmbeddings(engine=engine, **options)
    assert MillpondEmbeddings(engine=engine, device="auto", dimensions=384).engine is engine


def test_an_engine_is_an_engine() -> None:
    with pytest.raises(TypeError, match="must be a millpond.Engine, not a str"):
        MillpondEmbeddings.model_validate({"engine": "owner/name"})


async def test_an_async_engine_is_its_engine(engine: Engine) -> None:
    for adapter in (MillpondEmbeddings, MillpondReranker, MillpondCrossEncoder):
        assert adapter(engine=AsyncEngine(engine)).engine is engine
    embeddings = MillpondEmbeddings(engine=AsyncEngine(engine))
    assert embeddings.embed_query("a") == await embeddings.aembed_query("a")


def test_nothing_is_loaded_until_a_text_comes() -> None:
    embeddings = MillpondEmbeddings(model="./no-such-folder")
    with pytest.raises(ModelLoadError, match="no-such-folder"):
        embeddings.embed_query("a")


def test_the_import_costs_no_torch() -> None:
    program = "import sys, langchain_millpond; langchain_millpond.MillpondEmbeddings(model='a'); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "langchain_millpond.embeddings" in modules
    assert "torch" not in modules


def test_the_engine_refuses_what_the_model_cannot(engine: Engine) -> None:
    with pytest.raises(InvalidDimensionsError, match="is_matryoshka"):
        MillpondEmbeddings(engine=engine, dimensions=64).embed_query("a")


@pytest.mark.parametrize("journey", ["pickle", "copy", "deepcopy", "model_copy", "dict", "json"])
def test_a_copied_or_pickled_embedding_gives_the_same_vectors(minilm: str, journey: str) -> None:
    built = MillpondEmbeddings(
        model=minilm, dtype="float32", query_prompt="ask: ", dimensions=64, hf_overrides={"is_matryoshka": True}
    )
    before = built.embed_query("tides")
    journeys = {
        "pickle": lambda: pickle.loads(pickle.dumps(built)),
        "copy": lambda: copy.copy(built),
        "deepcopy": lambda: copy.deepcopy(built),
        "model_copy": lambda: built.model_copy(deep=True),
        "dict": lambda: MillpondEmbeddings(**built.model_dump()),
        "json": lambda: MillpondEmbeddings.model_validate_json(built.model_dump_json()),
    }
    after = journeys[journey]()
    assert after == built
    assert after.embed_query("tides") == before
    assert built.model_copy(update={"query_prompt": None}).embed_query("tides") != before


def test_an_engine_travels_with_copies_and_with_nothing_else(engine: Engine) -> None:
    built = MillpondEmbeddings(engine=engine)
    for copied in (copy.copy(built), copy.deepcopy(built), built.model_copy(deep=True)):
        assert copied.engine is engine
    with pytest.raises(TypeError, match="engine=.*cannot be pickled.*model="):
        pickle.dumps(built)
    assert "engine" not in built.model_dump()
    with pytest.raises(ValidationError, match="either model= .* or engine="):
        MillpondEmbeddings(**built.model_dump())


def test_fields_are_fixed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        MillpondEmbeddings(model="a").model = "b"  # type: ignore[misc]


def test_it_can_be_a_key_whatever_its_options() -> None:
    overrides = {"is_matryoshka": True}
    one, same = (MillpondEmbeddings(model="m", hf_overrides=overrides, dimensions=8) for _ in range(2))
    other = MillpondEmbeddings(model="m", hf_overrides=overrides, dimensions=16)
    assert one == same != other and {one: 1, other: 2}[same] == 1
