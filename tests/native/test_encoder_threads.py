"""The threads of a native forward: they change no result, however many they are and whoever calls."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from millpond.models.native import structs
from millpond.models.native.encoder import NativeEncoder, bounds_of
from millpond.models.native.kernels import kernels_of
from millpond.models.native.plan import PlanBuilder
from millpond.native.library import isa

NATIVE = Path(__file__).parents[2] / "src/millpond/native"
pytestmark = pytest.mark.skipif(isa() is None, reason="no compiled kernels: no C++ compiler, or no AVX2")


@pytest.fixture(scope="module")
def encoder():
    """Two layers, 64 wide, with rows dropped in the last one."""
    torch.manual_seed(0)
    dtype, width, inner = torch.float32, 64, 448  # more inner columns than are computed at a time
    builder = PlanBuilder(kernels_of(dtype), dtype)
    builder.embed(torch.randn(100, width), torch.randn(1000, width))
    norm = builder.norm_weights(structs.LAYER_NORM, torch.rand(width), torch.randn(width), 1e-6)
    builder.norm(norm, width)
    for last in (False, True):
        builder.heads(*(nn.Linear(width, width) for _ in range(3)))
        builder.attention(heads=2, kv_heads=2, dim=32, scale=0.2, last=last)
        builder.o_proj(nn.Linear(width, width))
        builder.norm(norm, width, residual=True)
        builder.mlp(nn.Linear(width, inner), nn.Linear(inner, width), "gelu")
        builder.norm(norm, width, residual=True)
    return NativeEncoder(builder.build())


def encode(encoder, lengths, rows, threads):
    ids = np.random.default_rng(len(lengths)).integers(0, 100, sum(lengths), dtype=np.int32)
    return encoder.encode(ids, bounds_of(lengths), rows=rows, threads=threads)


def test_more_threads_than_a_process_keeps_are_fewer(encoder):
    expected = encode(encoder, [30] * 300, "mean", 1)
    assert torch.equal(encode(encoder, [30] * 300, "mean", 300), expected)
    assert torch.equal(encode(encoder, [30], "mean", 300), encode(encoder, [30], "mean", 1))


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
    flags = ["-mavx2", "-mfma", "-mf16c", "-mbmi2", "-std=c++17", "-O1", "-pthread", f"-I{NATIVE}"]
    subprocess.run(["g++", *flags, "-o", folder / "cuts", folder / "cuts.cpp"], check=True)

    def cut(threads, block, lengths):
        command = [folder / "cuts", str(threads), str(block), *map(str, lengths)]
        return [int(size) for size in subprocess.run(command, capture_output=True, check=True).stdout.split()]

    return cut


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
