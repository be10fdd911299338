"""What a text's rows may depend on: the text. Not on the batch, the threads, other calls, or earlier ones."""

import json
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.native.models import MODELS, PRECISIONS, built, compiled, encoder_of, every_isa, linear
from tests.tiny import TEXTS, write_checkpoint

from millpond.backends.native.encoder import bounds_of
from millpond.backends.native.kernels import kernels_of
from millpond.backends.native.packing.weight_packer import tensor_of
from millpond.backends.native.self_check import VOCABULARY
from millpond.native.library import INSTRUCTION_SETS, ISAS, isa

# --- What a text's rows may depend on: the text. Not on the batch, the threads, other calls, or earlier ones ----------


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
    return np.split(result, np.cumsum(lengths)[:-1]) if rows == "all" else list(result)


def assert_same(one, other):
    assert len(one) == len(other)
    different = [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if not np.array_equal(a, b, equal_nan=True)]
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
    known = np.concatenate([encoded(encoder, [word[None]])[0] for word in words])
    ids = np.random.default_rng(0).integers(0, VOCABULARY, 5000).astype(np.int32)
    for rows in ROWS:
        result = encoder.encode(ids, np.arange(5001, dtype=np.int32), rows=rows, threads=threads)
        assert np.array_equal(result, known[ids])


@every_isa
@every_model
@pytest.mark.parametrize(("bad", "threads"), [(np.nan, 1), (np.inf, 3)], ids=str)
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
            rows = words.float32().copy()
            rows[poison] = bad
            self.builder.embed(tensor_of(rows), *tables, **options)

    encoder = encoder_of(isa, lambda builder: model(Poisoned(builder), PRECISIONS[isa], positions=POSITIONS))
    assert_same(encoded(encoder, texts, threads=threads), expected)
    for place in (0, 3, 8, len(texts) - 1):
        broken = [text.copy() for text in texts]
        broken[place][len(broken[place]) // 2] = poison
        result = encoded(encoder, broken, threads=threads)
        assert np.isnan(result[place]).any()
        others = [i for i in range(len(texts)) if i != place]
        assert_same([result[i] for i in others], [expected[i] for i in others])
    whole = [np.full(300, poison, dtype=np.int32)] * 3
    assert all(np.isnan(part).all() for part in encoded(encoder, whole, threads=threads))
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
            same = all(np.array_equal(a, b) for a, b in zip((*result, *again), (*expected, *expected), strict=True))
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


# --- The threads of a native forward: they change no result, however many they are and whoever calls ------------------


NATIVE = Path(__file__).parents[2] / "src/millpond/native"


@pytest.fixture(scope="module")
def encoder():
    """Two layers, 64 wide, with rows dropped in the last one."""
    random = np.random.default_rng(0)
    width, inner = 64, 448  # more inner columns than are computed at a time

    def layer(into, out):
        return linear(random.standard_normal((out, into)) / into**0.5, random.standard_normal(out))

    def model(builder):
        builder.embed(tensor_of(random.standard_normal((100, width))), tensor_of(random.standard_normal((1000, width))))
        norm = builder.layer_norm(tensor_of(random.random(width)), tensor_of(random.standard_normal(width)), 1e-6)
        builder.norm(norm, width)
        for _ in range(2):
            builder.heads(*(layer(width, width) for _ in range(3)))
            builder.attention(heads=2, kv_heads=2, dim=32, scale=0.2)
            builder.o_proj(layer(width, width))
            builder.norm(norm, width, residual=True)
            builder.mlp(layer(width, inner), layer(inner, width), "gelu")
            builder.norm(norm, width, residual=True)

    return built(kernels_of("float32"), model)


def encode(encoder, lengths, rows, threads):
    ids = np.random.default_rng(len(lengths)).integers(0, 100, sum(lengths), dtype=np.int32)
    return encoder.encode(ids, bounds_of(lengths), rows=rows, threads=threads)


@compiled
def test_more_threads_than_a_process_keeps_are_fewer(encoder):
    expected = encode(encoder, [30] * 300, "mean", 1)
    assert np.array_equal(encode(encoder, [30] * 300, "mean", 300), expected)
    assert np.array_equal(encode(encoder, [30], "mean", 300), encode(encoder, [30], "mean", 1))


CUTS = """
#include "encoder/forward.h"
#include "parallel.cpp"
#include <stdio.h>
#include <stdlib.h>

int main(int count, char** arguments) {
  int32_t bounds[1000] = {0};
  const int texts = count - 3;
  for (int i = 0; i < texts; i++) bounds[i + 1] = bounds[i] + atoi(arguments[i + 3]);
  EncodeCall call = {};
  call.bounds = bounds;
  call.texts = texts;
  call.threads = atoi(arguments[1]);
  call.block = atoi(arguments[2]);
  for (int64_t from = 0, to; from < texts; from = to) {
    to = Forward<FmaIsa>::block_end(call, from, call.threads);
    printf("%d ", bounds[to] - bounds[from]);
  }
}
"""


@pytest.fixture(scope="module")
def cuts(tmp_path_factory):
    """The blocks into which a call's texts are cut."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("cuts")
    (folder / "cuts.cpp").write_text(CUTS)
    flags = [*INSTRUCTION_SETS[0].flags, "-std=c++17", "-O1", "-pthread", f"-I{NATIVE}"]
    subprocess.run(["g++", *flags, "-o", folder / "cuts", folder / "cuts.cpp"], check=True)

    def cut(threads, block, lengths):
        command = [folder / "cuts", str(threads), str(block), *map(str, lengths)]
        return [int(size) for size in subprocess.run(command, capture_output=True, check=True).stdout.split()]

    return cut


@compiled
@pytest.mark.contract
@pytest.mark.parametrize(
    ("threads", "block", "lengths", "expected"),
    [
        pytest.param(2, 160, [50] * 16, [150, 100, 150, 150, 100, 150], id="six-of-about-the-same-size"),
        pytest.param(2, 160, [100] * 7, [100] * 7, id="two-would-be-more-than-a-block"),
        pytest.param(2, 160, [50] * 4, [100, 100], id="one-for-each-thread"),
        pytest.param(4, 160, [50] * 4, [50] * 4, id="a-text-for-each-thread"),
        pytest.param(1, 160, [40] * 9, [120, 120, 120], id="one-thread"),
        pytest.param(2, 160, [400, 10, 10, 300], [400, 20, 300], id="longer-than-a-block"),
        pytest.param(3, 64, [1], [1], id="one-token"),
    ],
)
def test_blocks_leave_every_thread_the_same_work(cuts, threads, block, lengths, expected):
    assert cuts(threads, block, lengths) == expected


# --- The native encoder under each instruction set that this processor has: ``MILLPOND_ISA`` caps it ------------------


_CAPS = ISAS[: ISAS.index(isa() or ISAS[0]) + 1]

_EMBED = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
import numpy as np
from millpond import Engine
from millpond.native.library import isa
from tests.tiny import TEXTS
told = {"isa": isa()}
for dtype in ("float32", "bfloat16", "auto"):
    with Engine(sys.argv[2], dtype=dtype, device="cpu") as engine:
        texts = list(TEXTS) * 8
        vectors = np.asarray(engine.embed(texts))
        told[dtype] = vectors[: len(TEXTS)].tolist()
        told[f"{dtype} alone"] = np.asarray(engine.embed(texts[:1]))[0].tolist() == vectors[0].tolist()
        told[f"{dtype} native"] = engine._replicas.runner.model.backend == "native"
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """What a process under each cap embeds; ``None``: torch's operators."""
    config = {"hidden_size": 96, "num_attention_heads": 3, "intermediate_size": 160}
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("tiny") / "model", "bert", config=config)
    processes = {}
    for cap in (None, *_CAPS):
        variables = {"MILLPOND_NATIVE": "0"} if cap is None else {"MILLPOND_NATIVE": "1", "MILLPOND_ISA": cap}
        command = [sys.executable, "-c", _EMBED, json.dumps(sys.path), str(checkpoint)]
        processes[cap] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables})
    texts = {cap: process.communicate(timeout=300)[0] for cap, process in processes.items()}
    assert all(process.returncode == 0 for process in processes.values())
    return {cap: json.loads(text) for cap, text in texts.items()}


@pytest.mark.slow
@pytest.mark.parametrize("cap", _CAPS)
def test_the_encoder_equals_torch_under_every_cap(told, cap):
    under, reference = told[cap], np.array(told[None]["float32"])
    assert under["isa"] == cap
    assert not told[None]["float32 native"]
    assert under["float32 native"]
    assert under["float32 alone"]
    assert under["bfloat16 alone"] or not under["bfloat16 native"]
    np.testing.assert_allclose(under["float32"], reference, atol=2e-5)
    np.testing.assert_allclose(under["bfloat16"], reference, atol=0.05)
    assert under["bfloat16 native"] == (PRECISIONS[cap] == "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("cap", [cap for cap in _CAPS if PRECISIONS[cap] == "float32"])
def test_below_bfloat16_the_encoder_is_in_float32(told, cap):
    assert told[cap]["auto"] == told[cap]["float32"]
    assert told[cap]["auto native"]
    assert len(TEXTS) == len(told[cap]["auto"])
