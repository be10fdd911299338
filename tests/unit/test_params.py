"""PoolingParams and EngineConfig are valid from construction."""

import dataclasses

import pytest

from millpond.config import EngineConfig
from millpond.errors import InvalidRequestError, ModelLoadError
from millpond.params import PoolingParams


def test_what_was_given():
    assert PoolingParams().given() == frozenset()
    assert PoolingParams(dimensions=64, truncate="start").given() == {"dimensions", "truncate"}


def test_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PoolingParams().dimensions = 3
    with pytest.raises(TypeError):
        PoolingParams("embed")
    with pytest.raises(TypeError):
        PoolingParams(dimension=3)


@pytest.mark.parametrize(
    "options",
    [
        {"task": "summarize"},
        {"role": "passage"},
        {"truncate": None},
        {"output_dtype": "float64"},
        {"normalize": 1},
        {"use_activation": "no"},
        {"prompt": 3},
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": True},
        {"truncate_prompt_tokens": -2},
    ],
)
def test_impossible_values(options):
    with pytest.raises(InvalidRequestError, match=next(iter(options))):
        PoolingParams(**options)


@pytest.mark.parametrize(
    "options", [{"max_batch_tokens": 0}, {"max_queue": -1}, {"convert": "magic"}, {"hf_overrides": "x"}]
)
def test_impossible_engines(options):
    with pytest.raises(InvalidRequestError, match=next(iter(options))):
        EngineConfig(model="m", **options)


def test_no_model():
    with pytest.raises(ModelLoadError):
        EngineConfig(model="")
