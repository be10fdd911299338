"""Whole models in the native encoder against float64, and what a call may read of them."""

from functools import partial

import numpy as np
import pytest
import torch
from tests.native.steps import MODELS, PRECISIONS, encoder_of, every_isa

from millpond.models.native.encoder import bounds_of
from millpond.models.native.self_check import VOCABULARY, formulas, read

LENGTHS = (1, 17, 33, 64, 120, 1)
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
ROWS = ("all", "first", "last", "mean")


def native_of(isa, model):
    return encoder_of(isa, lambda builder: model(builder, PRECISIONS[isa], positions=130))


def drawn_ids(lengths, seed=0):
    return np.random.default_rng(seed).integers(0, VOCABULARY, sum(lengths)).astype(np.int32)


def assert_like(isa, result, expected):
    """As near as the precision of the states through two layers."""
    result = result.double()
    assert result.shape == expected.shape
    size = expected.square().mean(-1, keepdim=True).sqrt()
    off = (result - expected) / size
    exact = PRECISIONS[isa] is torch.float32
    assert off.abs().max() < (2e-5 if exact else 0.05)
    assert off.square().mean(-1).sqrt().max() < (3e-6 if exact else 0.01)


@every_isa
@every_model
@pytest.mark.parametrize(("rows", "threads"), [("all", 1), ("first", 2), ("last", 3), ("mean", 2)])
def test_a_whole_model_is_that_of_its_formulas(isa, model, rows, threads):
    native = native_of(isa, model)
    random = np.random.default_rng(1)
    ids = drawn_ids(LENGTHS)
    types = random.integers(0, 2, len(ids)).astype(np.int32)
    skip = np.array([int(random.integers(0, length)) for length in LENGTHS], dtype=np.int32)
    keys = np.array([int(random.integers(1, length + 1)) for length in LENGTHS], dtype=np.int32)
    for options in ({}, {"offset": 3, "types": types, "keys": keys} | ({} if rows == "all" else {"skip": skip})):
        inputs = {name: value for name, value in options.items() if name != "skip"}
        states = formulas(partial(model, positions=130), PRECISIONS[isa], ids, LENGTHS, **inputs)
        expected = read(states, LENGTHS, rows, options.get("skip"))
        result = native.encode(ids, bounds_of(LENGTHS), rows=rows, threads=threads, **options)
        assert_like(isa, result, expected)


@every_isa
@every_model
def test_reading_one_row_is_reading_all_and_taking_it(isa, model):
    """To the last bit: the last layer of fewer rows is the same arithmetic."""
    native = native_of(isa, model)
    ids, bounds = drawn_ids(LENGTHS), bounds_of(LENGTHS)
    everything = native.encode(ids, bounds)
    assert torch.equal(native.encode(ids, bounds, rows="first"), everything[bounds[:-1]])
    assert torch.equal(native.encode(ids, bounds, rows="last"), everything[bounds[1:] - 1])
    skip = np.array([length // 2 for length in LENGTHS], dtype=np.int32)
    assert torch.equal(native.encode(ids, bounds, rows="first", skip=skip), everything[bounds[:-1] + skip])


@every_isa
def test_the_time_of_each_kind_of_step_is_added_up(isa):
    native = native_of(isa, MODELS["post-norm"])
    ids, bounds = drawn_ids(LENGTHS), bounds_of(LENGTHS)
    timings = np.zeros(8)
    plain = native.encode(ids, bounds)
    assert torch.equal(native.encode(ids, bounds, timings=timings), plain)
    heads = 3  # no step of this model turns them
    assert (np.delete(timings, heads) > 0).all() and timings[heads] == 0
