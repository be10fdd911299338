"""Runs the encoder in tiles, emulated and built with AddressSanitizer, on memory of exactly the sizes that it asks for.

Run by test_encoder_tiles.py in a process of its own with the sanitizer preloaded, which ends the process at the first
read or write outside of a piece of memory.
"""

import ctypes
import sys
from pathlib import Path

import torch
from tests.native import test_encoder_tiles as tests
from tests.tiles import emulated_table

from millpond.attention import native as attention
from millpond.attention.segments import Segments
from millpond.attention.signature import Masking
from millpond.models.native import encoder, plan
from millpond.native import library

_malloc = ctypes.CDLL(None).malloc
_malloc.argtypes, _malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
_free = ctypes.CDLL(None).free
_free.argtypes = [ctypes.c_void_p]


class ExactMemory:
    """In place of ``Memory``: of the sanitizer's allocator, not zeroed, and without what is only fetched ahead."""

    def __init__(self, size):
        self.size = size
        self.address = _malloc(size)
        ctypes.memset(self.address, 0xFF, size)  # NaN

    def __del__(self):
        _free(self.address)


class WeightMemory(ExactMemory):
    def __init__(self, size):
        super().__init__(size - 4096)  # the unit behind the last one is fetched, never read


def main(folder):
    table = emulated_table(Path(folder), "-fsanitize=address", "-g1", "-O1")
    encoder.Memory, plan.Memory = ExactMemory, WeightMemory
    for model in tests.EXACT_MODELS:
        kernels = tests.kernels_in(table, model.pop("int8", "none"))
        built = tests.encoder_of(kernels, **model)
        for lengths in ([1], [15, 1], [16], [17, 16], [31, 33, 2], [70, 5], [300]):
            for built.block in (32, 256):
                for threads, rows in ((1, "all"), (2, "mean"), (2, "last")):
                    built._workspaces.clear()
                    ids, bounds = tests.ids_of(lengths), encoder.bounds_of(lengths)
                    out = built.encode(ids, bounds, rows=rows, threads=threads)
                    assert out.isfinite().all()
    library.kernel_table = lambda highest=None: table
    generator = torch.Generator().manual_seed(0)
    for lengths in ([1], [15, 1], [17, 16], [31, 33, 2], [70, 5]):
        for heads, kv_heads, dim in ((2, 1, 32), (1, 1, 48), (2, 2, 64), (1, 1, 80), (2, 1, 128), (1, 1, 256)):
            whole = torch.randn(sum(lengths), heads + 2 * kv_heads, dim, generator=generator).bfloat16()
            qkv = whole.split([heads, kv_heads, kv_heads], 1)
            bias = torch.randn(heads, max(lengths), max(lengths), generator=generator).bfloat16()
            for masking in (
                Masking(scale=0.2, causal=False),
                Masking(scale=0.2, causal=True, window=9),
                Masking(scale=0.2, causal=False, bias=bias),
            ):
                assert attention.attend(*qkv, Segments.of(lengths), masking).isfinite().all()


if __name__ == "__main__":
    main(sys.argv[1])
