"""The options of a request and of an engine are checked at construction."""

import dataclasses

import numpy as np
import pytest

from millpond import Engine, PoolingParams
from millpond.errors import InvalidRequestError, ModelLoadError


def test_given_names_the_options_that_were_set():
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
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": -2},
        {"dimensions": 3.0},
        {"dimensions": True},
        {"dimensions": np.array([8, 16])},
        {"step_tag_id": 1.0},
        {"returned_token_ids": np.array([0.5])},
    ],
)
def test_an_invalid_option_is_refused(options):
    with pytest.raises(InvalidRequestError, match=next(iter(options))):
        PoolingParams(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"max_batch_tokens": 0},
        {"max_queue": -1},
        {"max_queue": None},
        {"max_length": 0},
        {"max_length": True},
        {"convert": "magic"},
        {"trust_remote_code": True},
        {"hf_overrides": "x"},
        {"pooling": 5},
        {"device": None},
        {"dtype": None},
        {"revision": 3},
        {"normalize": "x"},
        {"normalize": 1},
    ],
)
def test_an_invalid_engine_option_is_refused(options):
    with pytest.raises(InvalidRequestError, match=f"^{next(iter(options))}=.*(must|choose|not available)"):
        Engine("m", **options)


def test_whole_numbers_of_numpy_become_ints():
    params = PoolingParams(
        dimensions=np.int64(64), step_tag_id=np.int32(3), truncate_prompt_tokens=np.int8(-1),
        returned_token_ids=np.array([1, 2]),
    )  # fmt: skip
    assert (params.dimensions, params.step_tag_id, params.truncate_prompt_tokens) == (64, 3, -1)
    assert params.returned_token_ids == (1, 2) and {type(params.dimensions), type(params.step_tag_id)} == {int}


def test_an_empty_model_name_is_refused():
    with pytest.raises(ModelLoadError):
        Engine("")
