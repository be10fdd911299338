"""The shapes that graphs are captured for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millpond.engine.execute.cuda.buckets import Bucket, Buckets


def fit(lengths: list[int], *, longest: int = 512) -> Bucket:
    bucket = Buckets(longest=longest).fit(lengths)
    assert bucket is not None
    return bucket


@given(st.lists(st.integers(1, 512), min_size=1, max_size=100), st.integers(0, 5000))
def test_a_bucket_holds_its_batch_and_wastes_little(lengths: list[int], room: int) -> None:
    most = max(lengths) + room
    bucket, total = fit(lengths, longest=most), sum(lengths)
    tail = bucket.tail(total)
    assert total + sum(tail) == bucket.tokens
    assert len(lengths) + len(tail) <= bucket.sequences
    assert max([*lengths, *tail]) <= bucket.longest <= most
    assert all(length > 0 for length in tail)
    wasted = bucket.tokens - total
    assert bucket.tokens == 64 or wasted / bucket.tokens < (
        1 / 3 if total <= 512 else 1 / 5 if total <= 4096 else 1 / 9
    )
    assert bucket.longest <= max(64, 2 * max(lengths) - 1)
    assert bucket.sequences <= max(4, 1.5 * (len(lengths) + len(tail)))


@given(st.lists(st.integers(1, 512), min_size=1, max_size=60), st.integers(1, 512))
def test_one_more_text_never_needs_a_smaller_shape(lengths: list[int], more: int) -> None:
    smaller, larger = fit(lengths), fit([*lengths, more])
    assert larger.tokens >= smaller.tokens and larger.longest >= smaller.longest


@pytest.mark.parametrize(
    ("lengths", "longest", "expected"),
    [
        ([1], 512, (64, 4, 64)),
        ([64], 512, (64, 4, 64)),
        ([65], 512, (96, 4, 128)),
        ([50] * 10, 512, (512, 12, 64)),
        ([513], 600, (640, 4, 600)),
        ([512] * 64, 512, (32768, 64, 512)),
        ([512] * 63 + [500], 512, (32768, 96, 512)),  # and one dummy sequence
        ([1] * 30, 8, (64, 48, 8)),  # 34 dummy tokens in five sequences of at most 8
        ([5], 5, (64, 16, 5)),
    ],
)
def test_shapes(lengths: list[int], longest: int, expected: tuple[int, int, int]) -> None:
    bucket = fit(lengths, longest=longest)
    assert (bucket.tokens, bucket.sequences, bucket.longest) == expected


def test_a_model_of_short_texts_gets_dummies_that_fit_its_positions() -> None:
    assert fit([5], longest=5).tail(5) == [5] * 11 + [4]
