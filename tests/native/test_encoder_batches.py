"""What a text's rows may depend on: the text. Not on the batch, the threads, other calls, or earlier ones."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tests.native.steps import MODELS, PRECISIONS, encoder_of, every_isa

from millpond.models.native.encoder import NativeEncoder, bounds_of
from millpond.models.native.self_check import VOCABULARY

every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
ROWS = ("all", "first", "last", "mean")


POSITIONS = 1300


def of_model(isa, model):
    return encoder_of(isa, lambda builder: model(builder, PRECISIONS[isa], positions=POSITIONS))


def batch(lengths, seed=0):
    """Ids of each text, split."""
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCABULARY, length).astype(np.int32) for length in lengths]


def encoded(encoder, texts, rows="all", **options):
    """The result of each text."""
    lengths = [len(text) for text in texts]
    result = encoder.encode(np.concatenate(texts), bounds_of(lengths), rows=rows, **options)
    return result.split(lengths if rows == "all" else 1)


def assert_same(one, other):
    assert len(one) == len(other)
    different = [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if not torch.equal(a, b)]
    assert not different


LENGTHS = (1, 2, 17, 33, 50, 64, 7, 120, 256, 31, 12, 13, 1, 65)


@every_isa
@every_model
@pytest.mark.parametrize("rows", ROWS)
def test_a_text_has_the_same_bits_in_every_batch(isa, model, rows):
    encoder = of_model(isa, model)
    texts = batch(LENGTHS)
    alone = [encoded(encoder, [text], rows)[0] for text in texts]
    for encoder.block, threads in ((1, 2), (32, 1), (64, 5), (96, 3), (512, 2), (10_000, 1)):
        assert_same(encoded(encoder, texts, rows, threads=threads), alone)
    order = np.random.default_rng(0).permutation(len(texts))
    shuffled = encoded(encoder, [texts[i] for i in order], rows)
    assert_same(shuffled, [alone[i] for i in order])
    for threads in (2, 3, 5):  # these divide the steps of a text
        assert_same([encoded(encoder, [text], rows, threads=threads)[0] for text in texts], alone)
        assert_same(encoded(encoder, texts[:5], rows, threads=threads), alone[:5])


@every_isa
@every_model
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_texts_longer_than_a_block(isa, model, threads):
    encoder = of_model(isa, model)
    texts = batch([600, 3, 1100, 1, 513])
    alone = [encoded(encoder, [text])[0] for text in texts]
    for encoder.block in (32, 512):
        assert_same(encoded(encoder, texts, threads=threads), alone)


@every_isa
@every_model
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_five_thousand_texts_of_one_token(isa, model, threads):
    encoder = of_model(isa, model)
    words = np.arange(VOCABULARY, dtype=np.int32)
    known = torch.cat([encoded(encoder, [word[None]])[0] for word in words])
    ids = np.random.default_rng(0).integers(0, VOCABULARY, 5000).astype(np.int32)
    for rows in ROWS:
        result = encoder.encode(ids, np.arange(5001, dtype=np.int32), rows=rows, threads=threads)
        assert torch.equal(result, known[ids])


@every_isa
@every_model
@pytest.mark.parametrize(("bad", "threads"), [(torch.nan, 1), (torch.inf, 3)], ids=str)
def test_a_text_of_nan_harms_neither_its_neighbours_nor_later_calls(isa, model, bad, threads):
    """The workspace is used again, and 0 times what is left there would be NaN."""
    poison = 7
    texts = [np.where(text == poison, poison + 1, text).astype(np.int32) for text in batch(LENGTHS)]
    sound = of_model(isa, model)
    expected = encoded(sound, texts)

    class Poisoned:
        """The builder, but one word is none."""

        def __init__(self, builder):
            self.builder = builder

        def __getattr__(self, name):
            return getattr(self.builder, name)

        def embed(self, words, *tables, **options):
            words = words.clone()
            words[poison] = bad
            self.builder.embed(words, *tables, **options)

    encoder = encoder_of(isa, lambda builder: model(Poisoned(builder), PRECISIONS[isa], positions=POSITIONS))
    assert_same(encoded(encoder, texts, threads=threads), expected)
    for place in (0, 3, 8, len(texts) - 1):
        broken = [text.copy() for text in texts]
        broken[place][len(broken[place]) // 2] = poison
        result = encoded(encoder, broken, threads=threads)
        assert result[place].isnan().any()
        others = [i for i in range(len(texts)) if i != place]
        assert_same([result[i] for i in others], [expected[i] for i in others])
    whole = [np.full(300, poison, dtype=np.int32)] * 3
    assert all(part.isnan().all() for part in encoded(encoder, whole, threads=threads))
    assert_same(encoded(encoder, texts, threads=threads), expected)
    assert_same([encoded(encoder, [text], threads=threads)[0] for text in texts], expected)


@every_isa
@every_model
def test_concurrent_calls_of_one_encoder(isa, model):
    """Calls of all sizes from many threads; as many workspaces are kept as calls ran at once."""
    encoder = of_model(isa, model)
    texts = batch([1, 300, 17, 64, 90, 5, 33, 128])
    alone = [encoded(encoder, [text])[0] for text in texts]
    callers, together = 6, threading.Barrier(6)

    def caller(seed):
        random = np.random.default_rng(seed)
        together.wait()
        for _ in range(20):
            chosen = random.integers(0, len(texts), random.integers(1, 8))
            result = encoded(encoder, [texts[i] for i in chosen], threads=int(random.integers(1, 4)))
            assert_same(result, [alone[i] for i in chosen])

    with ThreadPoolExecutor(callers) as pool:
        for done in [pool.submit(caller, seed) for seed in range(callers)]:
            done.result(timeout=120)
    assert 1 <= len(encoder._workspaces) <= callers


@every_isa
def test_a_workspace_grows_and_is_used_again(isa):
    encoder = of_model(isa, MODELS["post-norm"])
    small, large = batch([5, 9]), batch([700, 300], seed=1)
    first = encoded(encoder, small)
    (kept,) = encoder._workspaces
    assert_same(encoded(encoder, small), first)
    assert encoder._workspaces == [kept]
    before = encoded(encoder, large)
    (grown,) = encoder._workspaces
    assert grown.size > kept.size
    assert_same(encoded(encoder, small), first)
    assert_same(encoded(encoder, large), before)
    assert encoder._workspaces == [grown]


@every_isa
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_call_in_a_forked_child(isa, threads):
    """Also after threads of the parent have computed: they are not in the child."""
    encoder = of_model(isa, MODELS["pre-norm"])
    texts = batch([20, 3, 200, 40])
    expected = encoded(encoder, texts, threads=threads)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            result = encoded(encoder, texts, threads=threads)
            again = encoded(encoder, texts, threads=threads)
            same = all(torch.equal(a, b) for a, b in zip((*result, *again), (*expected, *expected), strict=True))
            os.write(writer, b"same" if same else b"different")
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        timer = threading.Timer(60, os.kill, (child, 9))
        timer.start()
        assert answer.read() == b"same"
        timer.cancel()
    os.waitpid(child, 0)
    assert_same(encoded(encoder, texts, threads=threads), expected)


@every_isa
@every_model
def test_results_of_separate_encoders_are_the_same(isa, model):
    """Nothing of a plan is kept by process."""
    texts = batch(LENGTHS)
    one, other = (of_model(isa, model) for _ in range(2))
    assert isinstance(one, NativeEncoder)
    assert_same(encoded(one, texts), encoded(other, texts))
    del one
    assert_same(encoded(other, texts), encoded(of_model(isa, model), texts))
