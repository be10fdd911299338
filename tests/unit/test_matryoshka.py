"""The widths that are allowed, and how vectors are cut."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.errors import InvalidDimensionsError
from millpond.models.build_spec import matryoshka_family
from millpond.vectors import matryoshka


def check(dimensions, **options):
    return matryoshka.check(
        dimensions,
        **{"native": 1024, "trained": True, "declared": None, "model": "Qwen/Qwen3-Embedding-0.6B", **options},
    )


def test_the_native_width_is_always_accepted():
    for options in ({}, {"trained": False}, {"declared": (64, 128)}):
        assert check(None, **options) == check(1024, **options) == 1024


def test_a_checkpoints_own_cut_is_the_default_and_the_native_width_stays_available():
    for options in ({}, {"declared": (64, 128)}, {"trained": False}):
        assert check(None, default=100, **options) == check(100, default=100, **options) == 100
        assert check(1024, default=100, **options) == 1024
    with pytest.raises(InvalidDimensionsError, match="one of 64, 128, 1024"):
        check(100, declared=(64, 128))


def test_the_message_names_value_limit_and_way_out():
    with pytest.raises(InvalidDimensionsError) as caught:
        check(2048, smallest=32)
    assert str(caught.value) == ("dimensions=2048 is more than Qwen/Qwen3-Embedding-0.6B has (1024); choose 32 to 1024")
    assert isinstance(caught.value, ValueError)


def test_only_declared_widths_are_accepted():
    assert check(128, declared=(64, 128)) == 128
    with pytest.raises(InvalidDimensionsError, match="one of 64, 128, 1024"):
        check(96, declared=(64, 128))


def test_the_smallest_width():
    assert check(32, smallest=32) == 32
    with pytest.raises(InvalidDimensionsError, match="choose 32 to 1024"):
        check(31, smallest=32)


@pytest.mark.parametrize("bad", [0, -5, True, 3.0, "64", None.__class__, np.array([64, 64])])
def test_an_invalid_width_is_refused(bad):
    with pytest.raises(InvalidDimensionsError):
        check(bad)


def test_numpy_ints_are_ints():
    assert check(np.int64(64)) == 64 and type(check(np.int64(64))) is int


@given(st.integers(1, 16), st.integers(1, 20))
def test_a_normalized_cut_is_the_unit_vector_of_the_head(width, count):
    rows = np.random.default_rng(count).normal(size=(count, 16)).astype(np.float32)
    cut = matryoshka.cut(rows, width, normalize=True)
    head = rows[:, :width].astype(np.float64)
    np.testing.assert_allclose(cut, head / np.linalg.norm(head, axis=1, keepdims=True), atol=1e-6)
    assert cut.dtype == np.float32 and cut.flags.c_contiguous
    np.testing.assert_array_equal(matryoshka.cut(rows, width, normalize=False), rows[:, :width])


def test_a_zero_row_stays_zero():
    assert not matryoshka.cut(np.zeros((1, 8), dtype=np.float32), 4, normalize=True).any()


@pytest.mark.parametrize(
    ("name", "smallest"),
    [
        ("Qwen/Qwen3-Embedding-0.6B", 32),
        ("/models/qwen3-embedding-8b", 32),
        ("nomic-ai/nomic-embed-text-v1.5", 64),
        ("Snowflake/snowflake-arctic-embed-l-v2.0", 256),
    ],
)
def test_known_families(name, smallest):
    assert matryoshka_family(name).smallest == smallest


@pytest.mark.parametrize("name", ["nomic-ai/nomic-embed-text-v1", "BAAI/bge-base-en-v1.5", "my-qwen3-embedding-4b"])
def test_other_names_belong_to_no_family(name):
    assert matryoshka_family(name) is None
