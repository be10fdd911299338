"""The engine returns one frozen type per task, whatever the input."""

import asyncio
import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from millpond import (
    ClassificationOutput,
    EmbeddingOutput,
    Engine,
    Entity,
    InvalidRequestError,
    LabelScore,
    Ragged,
    RerankOutput,
    RerankResult,
    RewardOutput,
    ScoreOutput,
    SparseEmbeddingOutput,
    TokenClassificationOutput,
    TokenEmbeddingOutput,
    Usage,
)

INPUTS = {"none": [], "one": ["a"], "tuple": ("a", "mill pond"), "empty text": [""], "duplicates": ["a", "b", "a"]}


@pytest.fixture
def engine(engine_of: Callable[..., Engine]) -> Engine:
    return engine_of("bert")


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


async def test_rows_become_lists_of_python_numbers_and_the_event_loop_gets_its_turn():
    rows = np.random.default_rng(0).standard_normal((300, 4), np.float32)
    flags = np.zeros(300, np.bool_)
    output = EmbeddingOutput(embeddings=rows, cached=flags, truncated=flags, usage=Usage(prompt_tokens=300))
    lists = output.tolist()
    np.testing.assert_array_equal(np.asarray(lists, np.float32), rows)
    assert len(lists) == 300 and {type(number) for row in lists for number in row} == {float}
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    assert await output.atolist() == lists
    assert turns >= 2  # 300 rows are three slices
    counting.cancel()
    empty = EmbeddingOutput(embeddings=rows[:0], cached=flags[:0], truncated=flags[:0], usage=Usage(prompt_tokens=0))
    assert await empty.atolist() == empty.tolist() == []


def flags(n: int) -> np.ndarray:
    return np.zeros(n, dtype=np.bool_)


def classified(rows: list[list[float]]) -> ClassificationOutput:
    probs = np.array(rows, dtype=np.float32).reshape(-1, 3)
    return ClassificationOutput(
        probs=probs, labels=("x", "y", "z"), truncated=flags(len(probs)), usage=Usage(prompt_tokens=len(probs))
    )


def ranked(scores: list[float], top_n: int | None = None) -> RerankOutput:
    return RerankOutput.ranked(
        np.array(scores, dtype=np.float32),
        [f"document {i}" for i in range(len(scores))],
        top_n=top_n,
        truncated=flags(len(scores)),
        usage=Usage(prompt_tokens=7),
    )


def test_top_labels_are_sorted_best_first():
    output = classified([[0.25, 0.5, 0.125], [0.5, 0.25, 0.75]])
    assert output.top(2) == [[("y", 0.5), ("x", 0.25)], [("z", 0.75), ("x", 0.5)]]
    first = output.top()[0][0]
    assert type(first) is LabelScore
    assert (first.label, first.prob, type(first.prob)) == ("y", 0.5, float)
    assert [len(row) for row in output.top(9)] == [3, 3]
    assert classified([]).top(2) == []


@pytest.mark.parametrize("count", [0, -1, True, 1.0, "2"], ids=repr)
def test_the_number_of_results_must_be_a_positive_int(count):
    with pytest.raises(InvalidRequestError, match=re.escape(f"k={count!r} must be an int from 1")):
        classified([[0.5, 0.25, 0.5]]).top(count)
    with pytest.raises(InvalidRequestError, match=re.escape(f"top_n={count!r} must be an int from 1")):
        ranked([0.5], top_n=count)


def test_rerank_results_are_sorted_best_first():
    output = ranked([0.5, -2.0, 3.0, 0.5])
    assert isinstance(output, Sequence)
    assert [result.index for result in output] == [2, 0, 3, 1]
    assert output[0] == RerankResult(index=2, relevance_score=3.0, document="document 2")
    assert (type(output[0].index), type(output[0].relevance_score)) == (int, float)
    assert [result.document for result in output[1:3]] == ["document 0", "document 3"]
    assert output[-1] is output.results[-1] and output[3] in output
    assert output.truncated.shape == (4,) and output.usage.prompt_tokens == 7


def test_many_equal_scores_keep_their_order():
    scores = [float(i % 3) for i in range(300)]  # short arrays are sorted stably by any algorithm of numpy
    expected = sorted(range(300), key=lambda i: (-scores[i], i))
    assert [result.index for result in ranked(scores)] == expected


def test_outputs_with_a_list_for_each_text_are_sequences():
    entity = Entity(label="PER", score=0.5, start=0, end=3, text="Ada")
    ragged = Ragged.from_matrices([np.ones((2, 3), np.float32), np.ones((1, 3), np.float32)], width=3)
    usage = Usage(prompt_tokens=3)
    output = TokenClassificationOutput(
        entities=([entity], []), probs=ragged, labels=("x", "y", "z"), truncated=flags(2), usage=usage
    )
    assert list(output) == [[entity], []] and output[0] == [entity] and output[1:] == [[]]
    sparse = SparseEmbeddingOutput(embeddings=[{3: 0.5}, {}], truncated=flags(2), usage=usage)
    assert list(sparse) == [{3: 0.5}, {}] and len(sparse) == 2
    for one in (output, sparse):
        assert isinstance(one, Sequence)
        with pytest.raises(IndexError):
            _ = one[2]


@pytest.mark.parametrize(
    "output",
    [
        classified([[0.5, 0.25, 0.5]]),
        ranked([0.5]),
        Entity(label="PER", score=0.5, start=0, end=3, text="Ada"),
        ScoreOutput(scores=np.zeros(1, np.float32), truncated=flags(1), usage=Usage(prompt_tokens=1)),
        RewardOutput(
            rewards=Ragged.from_matrices([np.zeros((1, 2), np.float32)], width=2),
            truncated=flags(1),
            usage=Usage(prompt_tokens=1),
        ),
    ],
    ids=lambda output: type(output).__name__,
)
def test_each_output_is_frozen_and_keyword_only(output):
    field = dataclasses.fields(output)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(output, field, None)
    with pytest.raises(TypeError, match="positional"):
        type(output)(None)


def _ragged(*lengths: int) -> Ragged:
    flat = np.arange(sum(lengths) * 2, dtype=np.float32).reshape(-1, 2)
    return Ragged(flat=flat, offsets=np.cumsum([0, *lengths]))


def _array_outputs(count: int) -> dict[str, tuple[Any, npt.NDArray[Any]]]:
    """Every output that is an array, with that array."""
    rows = np.arange(count * 3, dtype=np.float32).reshape(count, 3)
    flags, usage = np.zeros(count, np.bool_), Usage(prompt_tokens=1)
    packed = rows.astype(np.uint8)
    equal = _ragged(*[4] * count)
    matrices = equal.flat.reshape(count, 4 if count else 0, 2)
    return {
        "embed": (EmbeddingOutput(embeddings=rows, cached=flags, truncated=flags, usage=usage), rows),
        "embed, binary": (EmbeddingOutput(embeddings=packed, cached=flags, truncated=flags, usage=usage), packed),
        "classify": (ClassificationOutput(probs=rows, labels=("a", "b", "c"), truncated=flags, usage=usage), rows),
        "score": (ScoreOutput(scores=rows[:, 0], truncated=flags, usage=usage), rows[:, 0]),
        "token_embed": (TokenEmbeddingOutput(embeddings=equal, truncated=flags, usage=usage), matrices),
        "reward": (RewardOutput(rewards=equal, truncated=flags, usage=usage), matrices),
    }


@pytest.mark.torch
@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("name", _array_outputs(0).keys())
def test_an_output_is_its_array_to_numpy_and_torch(name: str, count: int) -> None:
    import torch

    output, array = _array_outputs(count)[name]
    assert len(output) == count
    assert [row.tolist() for row in output] == array.tolist()
    assert [output[i].tolist() for i in range(count)] == [row.tolist() for row in output[:]] == array.tolist()
    for converted in (np.asarray(output), np.array(output), np.asarray(output, dtype=array.dtype, copy=False)):
        assert converted.dtype == array.dtype
        assert np.array_equal(converted, array)
    assert np.array(output, dtype=np.float64).dtype == np.float64
    assert not np.shares_memory(np.array(output), array), "np.array copies"
    assert np.shares_memory(np.asarray(output), array) or count == 0, "np.asarray does not"
    with pytest.raises(ValueError, match="avoid copy"):
        np.asarray(output, dtype=np.complex64, copy=False)
    tensor = torch.as_tensor(output)
    assert tensor.shape == array.shape
    assert np.array_equal(tensor.numpy(), array)


@pytest.mark.torch
@pytest.mark.parametrize("name", ["token_embed", "reward"])
def test_matrices_of_different_heights_are_no_array(name: str) -> None:
    import torch

    ragged, flags, usage = _ragged(2, 5), np.zeros(2, np.bool_), Usage(prompt_tokens=1)
    output: Any = (
        TokenEmbeddingOutput(embeddings=ragged, truncated=flags, usage=usage)
        if name == "token_embed"
        else RewardOutput(rewards=ragged, truncated=flags, usage=usage)
    )
    assert [matrix.shape for matrix in output] == [(2, 2), (5, 2)]
    for convert in (np.asarray, np.array, torch.as_tensor):
        with pytest.raises(ValueError, match=r"the 2 matrices have 2 to 5 rows.*\.flat"):
            convert(output)
