"""Memory: how many texts and vectors are kept, and for how long."""

import gc
import tracemalloc
from collections import deque

import pytest
from tests.tiny import SENTENCES, Layout, write_checkpoint

from millpond import Engine

WIDTH = 48
READ_AHEAD = 4096


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("memory") / "model", sentence_transformers=Layout())
    with Engine(folder, dtype="float32", device="cpu") as engine:
        yield engine


@pytest.fixture
def no_collector():
    """No garbage collection: it would hide a reference cycle around a call."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def short_texts(count, read=None):
    words = sorted({word for sentence in SENTENCES for word in sentence.split()})
    for i in range(count):
        if read is not None:
            read.append(i)
        yield f"{words[i % len(words)]} {words[i // len(words) % len(words)]} {words[i // 7 % len(words)]}"


@pytest.mark.contract
def test_embed_iter_reads_a_bounded_stretch_ahead(engine):
    read = deque(maxlen=1)
    ahead = [read[0] - i for i, _ in enumerate(engine.embed_iter(short_texts(12_000, read)))]
    assert len(ahead) == 12_000
    assert max(ahead) < READ_AHEAD


def growth(engine, keep):
    """Growth of Python's and numpy's memory in bytes from 4,000 texts to 12,000."""
    kept, sizes = [], []
    tracemalloc.start()
    try:
        for i, row in enumerate(engine.embed_iter(short_texts(16_384))):
            if keep:
                kept.append(row)
            if i in (4_000, 12_000):
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    return sizes[1] - sizes[0]


@pytest.mark.contract
def test_memory_does_not_grow_with_the_number_of_texts(engine, no_collector):
    vectors = 8_000 * WIDTH * 4
    assert growth(engine, keep=False) < vectors / 2
    assert growth(engine, keep=True) > vectors / 2  # as if the vectors were kept
