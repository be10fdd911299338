"""The kernels of heads on every instruction set of this processor, against the same in float64; no torch."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from tests.tiles import emulated_table, emulates

from millpond.backends.native import structs
from millpond.backends.native.heads import kernels
from millpond.backends.native.heads.activations import activation_of, torch_activation_of
from millpond.backends.native.heads.kernels import Linear, PackedWeight, VocabularyCall, gelu, kernel, run
from millpond.backends.native.heads.norms import layer_norm, unit
from millpond.backends.native.heads.pooling import pool
from millpond.backends.native.packing.weight_packer import NotSupported, tensor_of
from millpond.native import library
from millpond.vectors.activations import TORCH, activate

ISAS = [
    pytest.param(name, marks=pytest.mark.skipif(library.isa(name) != name, reason=f"no {name}"))
    for name in library.ISAS
]
PRECISIONS = ("float32", "bfloat16")


def numbers(*shape: int, scale: float = 1.0) -> np.ndarray:
    seed = [len(shape), *shape]
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


@pytest.fixture
def on_isa(monkeypatch):
    """Use no kernels above an instruction set."""

    def use(name: str) -> None:
        table = library.kernel_table(name)
        monkeypatch.setattr(kernels, "library", SimpleNamespace(kernel_table=lambda: table, absent=library.absent))

    return use


# --- Products and the exact GELU ------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("count", "width", "columns"), [(1, 384, 1), (5, 48, 24), (64, 50, 33), (65, 300, 32), (0, 32, 3)]
)
def test_a_product_of_any_size(isa, count, width, columns, on_isa):
    on_isa(isa)
    rows, weight, bias = numbers(count, width), numbers(columns, width), numbers(columns)
    linear = Linear(weight, bias)
    expected = rows.astype(np.float64) @ weight.T.astype(np.float64) + bias
    bound = 1e-6 * (1 + np.abs(rows) @ np.abs(weight).T)
    for threads in (1, 3):
        result = linear(rows, threads)
        assert result.shape == (count, columns)
        assert (np.abs(result - expected) <= bound).all()
    bare = Linear(weight)(rows, 1)
    assert (np.abs(bare + bias - result) <= bound).all()
    assert count == 0 or np.abs(bare - result).max() > 1e-2  # the bias is added


def test_a_row_does_not_depend_on_its_neighbours():
    rows, linear = numbers(200, 96), Linear(numbers(40, 96), numbers(40))
    together = linear(rows, 2)
    assert all(np.array_equal(linear(rows[i : i + 1], 1)[0], together[i]) for i in (0, 63, 64, 199))


@pytest.mark.parametrize("isa", ISAS)
def test_gelu_is_exact(isa, on_isa):
    on_isa(isa)
    x = np.concatenate((np.linspace(-15, 15, 40_001), numbers(10_006, scale=2))).astype(np.float32)
    exact = np.array([0.5 * v * math.erfc(-v / math.sqrt(2)) for v in x.tolist()])
    assert (np.abs(gelu(x) - exact) <= 1e-7 * np.maximum(1, np.abs(exact))).all()
    assert np.array_equal(gelu(np.float32([np.nan, np.inf, -np.inf, 0])), np.float32([np.nan, np.inf, 0, 0]), True)


# --- The vocabulary of a masked language model ----------------------------------------------------------------------


def rounded(x: np.ndarray, precision: str) -> np.ndarray:
    if precision == "float32":
        return x
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


class Masked:
    """A random head, its result by the kernel, and by float64."""

    def __init__(self, width: int, inner: int, vocabulary: int, precision: str) -> None:
        self.dense = rounded(numbers(inner, width, scale=width**-0.5), precision)
        self.decoder = rounded(numbers(vocabulary, inner, scale=inner**-0.5), precision)
        self.dense_bias, self.norm, self.norm_bias = numbers(inner), 1 + numbers(inner, scale=0.2), numbers(inner)
        self.decoder_bias = numbers(vocabulary) - 1
        self.packed = PackedWeight(tensor_of(self.dense), self.dense_bias, precision)
        self.units = PackedWeight(tensor_of(self.decoder), self.decoder_bias, precision)
        self.precision = precision
        self.padded = {name: np.pad(getattr(self, name), (0, -inner % 32)) for name in ("norm", "norm_bias")}

    def pooled(self, rows: np.ndarray, bounds: np.ndarray, logarithms: int, threads: int = 1) -> np.ndarray:
        out = np.full((len(bounds) - 1, self.units.struct.out), 7, np.float32)
        norm = structs.NormWeights(
            kind=structs.LAYER_NORM,
            weight=self.padded["norm"].ctypes.data,
            bias=self.padded["norm_bias"].ctypes.data,
            epsilon=1e-12,
        )
        call = VocabularyCall(
            rows=rows.ctypes.data,
            bounds=bounds.ctypes.data,
            out=out.ctypes.data,
            dense=self.packed.struct,
            decoder=self.units.struct,
            norm=norm,
            width=rows.shape[1],
            columns=self.dense.shape[0],
            texts=len(out),
            activation=structs.ACTIVATIONS["relu"],
            logarithms=logarithms,
            threads=threads,
        )
        run(kernel(f"vocabulary_{self.precision}"), call)
        return out[:, : len(self.decoder)]

    def expected(self, rows: np.ndarray, bounds: np.ndarray, logarithms: int) -> np.ndarray:
        x = np.maximum(rows.astype(np.float64) @ self.dense.T + self.dense_bias, 0)
        x -= x.mean(-1, keepdims=True)
        x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-12) * self.norm + self.norm_bias
        logits = x @ self.decoder.T + self.decoder_bias
        texts = [logits[a:b] for a, b in pairwise(bounds)]
        if logarithms == 0:
            return np.array([text.max(0) for text in texts])
        weights = [np.log1p(np.maximum(text, 0)) for text in texts]
        return np.array([(w if logarithms == 1 else np.log1p(w)).sum(0) for w in weights])


def bounds_of(lengths: list[int]) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("precision", PRECISIONS)
# Texts of several pieces and blocks, and blocks of several texts; a vocabulary that fills its last unit, and one less.
@pytest.mark.parametrize("lengths", [[1], [3, 17, 1, 8, 40, 2], [64, 1, 1, 64], [600, 1, 300], [1] * 70], ids=str)
@pytest.mark.parametrize(("width", "inner", "vocabulary"), [(96, 64, 96), (96, 64, 71), (48, 41, 100)])
def test_logits_pooled_over_texts(isa, precision, lengths, width, inner, vocabulary, on_isa):
    if not getattr(library.kernel_table(isa), f"vocabulary_{precision}"):
        pytest.skip(f"{isa} has no {precision}")
    on_isa(isa)
    head, bounds = Masked(width, inner, vocabulary, precision), bounds_of(lengths)
    rows = rounded(numbers(int(bounds[-1]), width), precision)
    tolerance = (
        1e-5 if precision == "float32" else 3e-2
    )  # bfloat16 has 8 bits, and the sum of a text many of its errors
    for logarithms in (0, 1, 2):
        expected = head.expected(rows, bounds, logarithms)
        result = head.pooled(rows, bounds, logarithms)
        assert (np.abs(result - expected) / (1 + np.abs(expected))).max() <= tolerance
        assert all(np.array_equal(result, head.pooled(rows, bounds, logarithms, threads)) for threads in (2, 5))
    # Negative control: another text's rows.
    assert (
        len(lengths) < 3
        or np.abs(head.pooled(rows[::-1].copy(), bounds, 0) - head.expected(rows, bounds, 0)).max() > 0.1
    )


@pytest.fixture(scope="module")
def tiles(tmp_path_factory):
    """The kernels with AMX's own emulated."""
    made, table = emulated_table(tmp_path_factory.mktemp("tiles")), library.kernel_table("avx512bf16")
    names = ("pack_rows_bfloat16",)
    entries = {"vocabulary_bfloat16": made.vocabulary_bfloat16, **{name: getattr(table, name) for name in names}}
    return SimpleNamespace(kernel_table=lambda: SimpleNamespace(**entries), kept=made, absent=library.absent)


@emulates[0]
@emulates[1]
@pytest.mark.parametrize("lengths", [[1], [3, 17, 1, 8, 40, 2], [64, 1, 1, 64], [600, 1, 300]], ids=str)
@pytest.mark.parametrize("width", [64, 1024])  # a unit in one part, and in several
def test_tiles_equal_pairs(tiles, width, lengths, monkeypatch):
    head, bounds = Masked(width, width, 71, "bfloat16"), bounds_of(lengths)
    rows = rounded(numbers(int(bounds[-1]), width), "bfloat16")
    for logarithms in (0, 1, 2):
        monkeypatch.setattr(kernels, "library", library)
        pairs = head.pooled(rows, bounds, logarithms)
        monkeypatch.setattr(kernels, "library", tiles)
        found = head.pooled(rows, bounds, logarithms)
        assert (np.abs(found - pairs) / (1 + np.abs(pairs))).max() <= 3e-2
        assert np.array_equal(found, head.pooled(rows, bounds, logarithms, threads=3))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_text_with_an_unknown_number_is_unknown(precision):
    if not getattr(library.kernel_table(), f"vocabulary_{precision}", None):
        pytest.skip(f"no {precision}")
    head, bounds = Masked(64, 64, 50, precision), bounds_of([5, 90, 3])
    rows = numbers(98, 64)
    rows[20, 7] = np.nan
    for logarithms in (0, 1):
        unknown = np.isnan(head.pooled(rows, bounds, logarithms))
        assert unknown[1].all() and not unknown[[0, 2]].any()


# --- Pooling, norms and activations ---------------------------------------------------------------------------------

#                  text of three rows              | one row
HIDDEN = np.float32([[1, -4], [3, 8], [5, -1], [7, -2]])
BOUNDS = np.int32([0, 3, 4])
GOLDEN = {
    "cls": [[1, -4], [7, -2]],
    "lasttoken": [[5, -1], [7, -2]],
    "mean": [[3, 1], [7, -2]],
    "max": [[5, 8], [7, -2]],
    "mean_sqrt_len": [[9 / math.sqrt(3), 3 / math.sqrt(3)], [7, -2]],
    "weightedmean": [[(1 + 6 + 15) / 6, (-4 + 16 - 3) / 6], [7, -2]],
}
# The first row of the first text is a prompt that pooling leaves out.
WITHOUT_PROMPT = {
    "cls": [[3, 8], [7, -2]],
    "lasttoken": [[5, -1], [7, -2]],
    "mean": [[4, 3.5], [7, -2]],
    "max": [[5, 8], [7, -2]],
    "mean_sqrt_len": [[8 / math.sqrt(2), 7 / math.sqrt(2)], [7, -2]],
    "weightedmean": [[(6 + 15) / 5, (16 - 3) / 5], [7, -2]],
}


@pytest.mark.parametrize("mode", GOLDEN)
def test_pooling(mode):
    assert np.allclose(pool((mode,), HIDDEN, BOUNDS, None), GOLDEN[mode], rtol=1e-6)
    assert np.allclose(pool((mode,), HIDDEN, BOUNDS, np.int32([1, 0])), WITHOUT_PROMPT[mode], rtol=1e-6)
    both = pool((mode, "cls"), HIDDEN, BOUNDS, None)
    assert np.allclose(both, np.concatenate((GOLDEN[mode], GOLDEN["cls"]), axis=1), rtol=1e-6)
    assert both.dtype == np.float32


def test_norms_of_rows_that_have_no_direction():
    rows = np.float32([[0, 0, 0], [3, 0, 4]])
    assert np.array_equal(unit(rows), np.float32([[0, 0, 0], [0.6, 0, 0.8]]))
    normed = layer_norm(rows, np.ones(3, np.float32), None, 1e-5)
    assert np.isfinite(normed).all() and np.abs(normed[1].mean()) < 1e-6


@pytest.mark.torch
@pytest.mark.parametrize("name", sorted(TORCH))
def test_activations_of_torch(name):
    import torch

    numbers = np.float32([[-30, -2, -0.4, 0, 0.3], [1, 1.7, 4, 9, 88]])
    module = getattr(torch.nn, name)(**({"dim": -1} if name in ("Softmax", "Softmin", "LogSoftmax") else {})).eval()
    expected = module(torch.from_numpy(numbers)).numpy()
    for actual in (activate(numbers, name), torch_activation_of(name)(numbers)):
        assert np.allclose(actual, expected, rtol=3e-6, atol=3e-7)


def test_an_unknown_activation_is_named():
    for read, name in ((activation_of, "xielu"), (torch_activation_of, "torch.nn.modules.activation.GLU")):
        with pytest.raises(NotSupported, match=name):
            read(name)
