"""The number of threads that a batch runs on."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers.activations import ACT2FN

from millpond.engine.execute.threads import (
    Threads,
    _multiplied_weights,
    default_threads,
    native_threads,
    on_native_threads,
    on_threads,
)
from millpond.models.linear import PlainLinear, ReorderedLinear, linear


@pytest.fixture
def backbone():
    """Two million multiplied weights, and an embedding table that is only looked up."""
    return torch.nn.Sequential(torch.nn.Embedding(9999, 8), torch.nn.Linear(1000, 2000, bias=True))


def test_embedding_tables_are_not_multiplied(backbone):
    assert _multiplied_weights(backbone) == 2_000_000


def test_more_tokens_more_threads(backbone, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    threads = Threads(backbone)
    assert [threads.count(tokens) for tokens in (1, 999, 1000, 2000, 10**6)] == [1, 1, 2, 3, 4]
    assert [threads.count(tokens, awake=True) for tokens in (1, 24, 25, 10**6)] == [1, 1, 2, 4]


def test_torchs_number_is_back_afterwards():
    before = torch.get_num_threads()
    with on_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with pytest.raises(KeyError), on_threads(before + 1):
        raise KeyError
    assert torch.get_num_threads() == before


def test_the_native_encoder_has_its_own_number():
    before = torch.get_num_threads()
    assert native_threads() == before
    with on_native_threads(3):
        assert (native_threads(), torch.get_num_threads()) == (3, 1)
        assert in_a_thread(native_threads) == in_a_thread(torch.get_num_threads)  # of this thread only
    assert (native_threads(), torch.get_num_threads()) == (before, before)
    with pytest.raises(KeyError), on_native_threads(3):
        raise KeyError
    assert (native_threads(), torch.get_num_threads()) == (before, before)


def in_a_thread(function):
    """The result of ``function`` in a new thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_the_default_of_later_threads_is_not_that_of_this_one():
    before = torch.get_num_threads()
    assert in_a_thread(lambda: (torch.set_num_threads(before + 2), default_threads(before + 1))) == (None, None)
    try:
        assert torch.get_num_threads() == before  # the number of this thread
        assert in_a_thread(torch.get_num_threads) == before + 1
    finally:
        default_threads(before)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("activation", [None, "gelu", "relu", "silu", "gelu_new", "gelu_pytorch_tanh", "mish"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_equals_torchs(activation, dtype, biased):
    generator = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(shape, generator=generator) for shape in ((48, 32), (48,)))
    rows = torch.randn(17, 32, generator=generator)
    layer = linear(weight.to(dtype), bias.to(dtype) if biased else None, activation)
    product = rows @ weight.T + (bias if biased else 0)
    expected = product if activation is None else ACT2FN[activation](product)
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(layer(rows.to(dtype)).float(), expected, atol=tolerance, rtol=tolerance)
    if dtype is torch.float32 or activation == "mish":
        assert isinstance(layer, PlainLinear)
    if isinstance(layer, ReorderedLinear):
        assert layer.weights == 48 * 32
