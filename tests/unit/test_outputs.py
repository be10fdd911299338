"""What the engine returns: one type per task, whatever went in, and nobody changes it afterwards."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.tiny import write_checkpoint

from millpond import EmbeddingOutput, Engine, Ragged, TokenEmbeddingOutput, Usage

INPUTS = {"none": [], "one": ["a"], "tuple": ("a", "mill pond"), "empty text": [""], "duplicates": ["a", "b", "a"]}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder: Path = write_checkpoint(tmp_path_factory.mktemp("outputs") / "bert", "bert")
    with Engine(folder, dtype="float32", device="cpu") as engine:
        yield engine


@pytest.mark.parametrize("texts", INPUTS.values(), ids=INPUTS.keys())
def test_embed_returns_one_type(engine: Engine, texts):
    output = engine.embed(texts)
    assert type(output) is EmbeddingOutput
    assert type(output.usage) is Usage
    assert output.embeddings.shape == (len(texts), engine.spec.dimensions)
    assert output.embeddings.dtype == np.float32
    for flags in (output.cached, output.truncated):
        assert flags.shape == (len(texts),)
        assert flags.dtype == np.bool_


@pytest.mark.parametrize("texts", INPUTS.values(), ids=INPUTS.keys())
def test_token_embed_returns_one_type(engine: Engine, texts):
    output = engine.token_embed(texts)
    assert type(output) is TokenEmbeddingOutput
    assert type(output.embeddings) is Ragged
    assert len(output.embeddings) == len(output.truncated) == len(texts)
    assert output.embeddings.flat.shape == (output.usage.prompt_tokens, engine.spec.hidden_size)


def test_the_tokens_of_duplicates_count_again(engine: Engine):
    once, twice = (engine.embed(["mill"] * n).usage.prompt_tokens for n in (1, 2))
    assert twice == 2 * once > 0


def test_outputs_are_frozen(engine: Engine):
    output = engine.embed(["a"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        output.embeddings = None  # type: ignore[misc, assignment]
    with pytest.raises(TypeError, match="positional"):
        Usage(3)  # type: ignore[misc]
