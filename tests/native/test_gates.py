"""Steps of EmbeddingGemma 2 and NeoMME in every instruction set, against the same in float64."""

import numpy as np
import pytest
from tests.native.models import PRECISIONS, assert_near, built, has, tokens

from millpond.backends.native import self_check
from millpond.backends.native.encoder import bounds_of
from millpond.backends.native.formulas import Inputs, formulas
from millpond.backends.native.kernels import kernels_of

LENGTHS = [1, 7, 40, 2, 33]


@pytest.mark.parametrize("rows", ["all", "first", "last"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("isa", [isa for isa in PRECISIONS if isa != "amx"])  # which has no float32
def test_gates_mixtures_and_words(isa, threads, rows):
    kernels = kernels_of("float32", isa) if has(isa) else None
    if kernels is None:
        pytest.skip(f"no kernels for float32 on {isa}")
    encoder = built(kernels, lambda builder: self_check.gates(builder, "float32"))
    ids = tokens(sum(LENGTHS)) % self_check.VOCABULARY
    expected = formulas(self_check.gates, "float32", Inputs(lengths=LENGTHS, ids=ids))
    bounds = bounds_of(LENGTHS)
    if rows != "all":
        expected = expected[bounds[:-1] if rows == "first" else bounds[1:] - 1]
    found = encoder.encode(ids.astype(np.int32), bounds, threads=threads, rows=rows)
    assert_near(found, expected, 2e-5 * abs(expected).max())
