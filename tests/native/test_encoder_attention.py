"""Attention of the native encoder against the same in float64: lengths, heads, masks, and what is added to scores."""

import numpy as np
import pytest
import torch
from tests.native.steps import (
    PRECISIONS,
    ROUNDING,
    assert_near,
    copied,
    encoder_of,
    every_isa,
    given,
    identity,
    numbers,
    tokens,
)
from tests.pairwise import pairwise

from millpond.models.native.encoder import bounds_of
from millpond.models.native.self_check import attended

# Around a vector, a block of rows, a unit of keys, and the rows that threads divide a text by (512).
LENGTHS = (1, 2, 5, 7, 12, 13, 15, 16, 17, 31, 32, 33, 48, 63, 65, 130)
HEADS = {  # heads, kv_heads, dim
    "2x32": (2, 2, 32),
    "4x64-grouped": (4, 2, 64),
    "3x32-one-key-head": (3, 1, 32),
    "2x96": (2, 2, 96),
    "2x128-grouped": (2, 1, 128),
    "1x256": (1, 1, 256),
}


class Texts:
    """Random queries, keys and values of several texts, and their attention both ways."""

    def __init__(self, isa, heads, kv_heads, dim, lengths, seed=0, size=1.0):
        self.isa, self.dtype, self.shape, self.lengths = isa, PRECISIONS[isa], (heads, kv_heads, dim), lengths
        self.rows = numbers((sum(lengths), (heads + 2 * kv_heads) * dim), self.dtype, seed, size)

    def native(self, *, threads=1, counts=None, **masks):
        heads, kv_heads, dim = self.shape
        columns = heads * dim
        encoder = encoder_of(
            self.isa,
            given(self.rows),
            lambda b: b.heads(identity(self.rows.shape[1])),
            lambda b: b.attention(heads=heads, kv_heads=kv_heads, dim=dim, last=True, **masks),
            lambda b: b.o_proj(identity(columns)),
            lambda b: b.norm(copied(), columns),
        )
        keys = None if counts is None else np.array(counts, dtype=np.int32)
        result = encoder.encode(tokens(len(self.rows)), bounds_of(self.lengths), keys=keys, threads=threads)
        return result[:, :columns].double()

    def expected(self, *, counts=None, **masks):
        heads, kv_heads, dim = self.shape
        counts = counts or [None] * len(self.lengths)
        results, sizes = [], []
        for rows, count in zip(self.rows.split(self.lengths), counts, strict=True):
            parts = rows.unflatten(1, (-1, dim)).split([heads, kv_heads, kv_heads], dim=1)
            result, size = attended(*parts, count=count, **masks)
            results.append(result.flatten(1))
            sizes.append(size.flatten(1))
        return torch.cat(results), torch.cat(sizes)

    def check(self, *, threads=1, **masks):
        expected, size = self.expected(**masks)
        result = self.native(threads=threads, **masks)
        scores = 1 + masks["scale"] * self.rows.abs().amax().item() ** 2 * self.shape[2] ** 0.5
        slack = 1e-6 * scores if self.dtype is torch.float32 else 3 * ROUNDING[self.dtype]
        if masks.get("softcap") and self.dtype is torch.bfloat16:
            slack += 4e-5 * masks["softcap"]
        assert_near(result, expected, slack * size + ROUNDING[self.dtype] * expected.abs())


MASKS = {
    "all": {},
    "causal": {"causal": True},
    "window-1": {"window": 1},
    "window-7": {"window": 7},
    "window-64": {"window": 64},
    "causal-window-7": {"causal": True, "window": 7},
    "causal-window-64": {"causal": True, "window": 64},
}
every_mask = pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)


@every_isa
@pairwise(shape=HEADS, masks=MASKS)
def test_attention_of_every_length(isa, shape, masks):
    heads, kv_heads, dim = shape
    Texts(isa, heads, kv_heads, dim, LENGTHS).check(scale=dim**-0.5, **masks)


@every_isa
@every_mask
def test_limited_keys(isa, masks):
    """Rows behind the last key attend too: a window may leave them none, and their result is 0."""
    lengths = [40, 40, 40, 40, 40, 100, 1, 1]
    counts = [0, 1, 39, 40, 20, 33, 1, 0]
    texts = Texts(isa, 3, 1, 64, lengths)
    texts.check(scale=0.125, counts=counts, **masks)
    without = texts.native(scale=0.125, counts=counts, window=7)
    assert (without[:40] == 0).all() and (without[-1] == 0).all()  # no key at all
    assert (without[160 + 26 : 200] == 0).all()  # the last of 20 keys is 7 positions back
    assert (without[160 : 160 + 26] != 0).any(dim=1).all()


@every_isa
@pairwise(softcap=[None, 5.0, 50.0], with_distances=[False, True], masks=MASKS)
def test_a_softcap_and_distances_while_scores_are_read(isa, softcap, with_distances, masks):
    heads, reach = 4, 130
    distances = numbers((heads, 2 * reach - 1), torch.float32, 5, 2.0) if with_distances else None
    texts = Texts(isa, heads, 2, 32, [1, 2, 31, 65, 130, 17], size=2.0)
    texts.check(scale=0.5, softcap=softcap, distances=distances, **masks)


@every_isa
def test_distances_and_limited_keys(isa):
    distances = numbers((2, 2 * 64 - 1), torch.float32, 5, 2.0)
    Texts(isa, 2, 2, 32, [64, 40, 3]).check(scale=1.0, distances=distances, counts=[33, 40, 0])


@every_isa
@pytest.mark.parametrize("size", [0.0, 1e-3, 30.0])
def test_small_and_large_scores(isa, size):
    """Without a maximum that is subtracted, these would leave float32."""
    texts = Texts(isa, 2, 2, 64, [3, 70], size=1.0)
    texts.rows[:, :256] *= size
    texts.rows = texts.rows.to(texts.dtype).float()
    texts.check(scale=1.0)


@every_isa
def test_scores_that_are_none_spoil_their_own_text_alone(isa):
    lengths = [20, 33, 1, 40]
    texts = Texts(isa, 2, 2, 32, lengths)
    before = texts.native(scale=0.2)
    for bad in (torch.nan, torch.inf):
        broken = Texts(isa, 2, 2, 32, lengths)
        # A copy through a product would spread it over the row: it arises in the step itself.
        broken.rows[25] = 3e38 if bad == torch.inf else torch.nan
        after = broken.native(scale=0.2)
        assert torch.equal(after[:20], before[:20]) and torch.equal(after[53:], before[53:])
        assert not after[20:53].isfinite().all()


@every_isa
@pytest.mark.parametrize(("threads", "masks"), [(1, {}), (2, {"causal": True}), (3, {"window": 64})], ids=str)
def test_long_texts(isa, threads, masks):
    Texts(isa, 2, 1, 32, [511, 1, 512, 513]).check(scale=0.2, threads=threads, **masks)


@pytest.mark.slow
@every_isa
@pairwise(masks=MASKS, length=[1023, 1025, 2048], threads=[1, 2])
def test_very_long_texts(isa, length, threads, masks):
    Texts(isa, 2, 1, 64, [length]).check(scale=0.125, threads=threads, **masks)


@pytest.mark.slow
@every_isa
@pytest.mark.parametrize("seed", range(20))
def test_random_shapes(isa, seed):
    random = np.random.default_rng(seed)
    kv_heads, dim = int(random.integers(1, 4)), int(random.choice([32, 64, 96, 128, 160, 256]))
    heads = kv_heads * int(random.integers(1, 4))
    lengths = random.integers(1, random.choice([5, 40, 300]), random.integers(1, 20)).tolist()
    limited = random.random() < 0.5
    Texts(isa, heads, kv_heads, dim, lengths, seed).check(
        scale=dim**-0.5,
        causal=bool(random.random() < 0.5),
        window=int(random.choice([1, 2, 3, 17, 33, 200])) if random.random() < 0.5 else None,
        softcap=float(random.choice([1, 30])) if random.random() < 0.3 else None,
        distances=numbers((heads, 2 * 300 - 1), torch.float32, seed) if random.random() < 0.3 else None,
        counts=[int(random.integers(0, length + 1)) for length in lengths] if limited else None,
        threads=int(random.integers(1, 4)),
    )
