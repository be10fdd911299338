"""How many threads a batch is worth."""

import pytest
import torch

from millpond.engine.threads import Threads, _multiplied_weights
from millpond.models.linear import PlainLinear, ReorderedLinear, linear


@pytest.fixture
def backbone():
    """Two million multiplied weights beside an embedding table that is only looked up."""
    return torch.nn.Sequential(torch.nn.Embedding(9999, 8), torch.nn.Linear(1000, 2000, bias=True))


def test_embedding_tables_are_not_multiplied(backbone):
    assert _multiplied_weights(backbone) == 2_000_000


def test_more_tokens_more_threads(backbone, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    threads = Threads(backbone, torch.device("cpu"))
    assert [threads.count(tokens) for tokens in (1, 999, 1000, 2000, 10**6)] == [1, 1, 2, 3, 4]


def test_torchs_number_is_back_afterwards(backbone):
    before = torch.get_num_threads()
    threads = Threads(backbone, torch.device("cpu"))
    with threads.using(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
    with pytest.raises(KeyError), threads.using(1):
        raise KeyError
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("activation", [None, "gelu", "relu", "gelu_new"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_equals_torchs(activation, dtype):
    generator = torch.Generator().manual_seed(0)
    weight, bias = (torch.randn(shape, generator=generator) for shape in ((48, 32), (48,)))
    rows = torch.randn(17, 32, generator=generator)
    layer = linear(weight.to(dtype), bias.to(dtype), activation)
    expected = PlainLinear(weight, bias, activation)(rows)
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(layer(rows.to(dtype)).float(), expected, atol=tolerance, rtol=tolerance)
    if dtype is torch.float32 or activation == "gelu_new":
        assert isinstance(layer, PlainLinear)
    if isinstance(layer, ReorderedLinear):
        assert layer.weights == 48 * 32
