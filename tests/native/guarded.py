"""Programs that run native encoders on memory whose end is guarded: a wrong address ends them.

python -m tests.native.guarded ISA pages|malloc [LIBRARY] [--beyond], or with the sanitizer preloaded: tiles FOLDER
"""

import ctypes
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from tests.approximate_search import guarded
from tests.native import test_tiles as tests
from tests.native.models import MODELS, PRECISIONS, built, copied, identity, integers, linear, numbers
from tests.tiles import emulated_table

from millpond.backends.native import encoder as encoders
from millpond.backends.native import structs
from millpond.backends.native.encoder import bounds_of
from millpond.backends.native.kernels import kernels_of
from millpond.backends.native.packing import weight_packer
from millpond.backends.native.packing.weight_packer import WeightPacker, tensor_of
from millpond.backends.native.plans import plan, rotation
from millpond.backends.native.plans.rotation import Rotation
from millpond.backends.native.self_check import VOCABULARY, gates
from millpond.native import library

READINGS = (structs.ALL_ROWS, structs.FIRST_ROW, structs.LAST_ROW, structs.MEAN_ROW)


class Guards:
    """Memory whose last byte is followed by what may not be touched: a page, or what a sanitizer watches."""

    def __init__(self, kind):
        self.pages = kind == "pages"
        self.kept = []

    def array(self, array):
        copy = guarded(array) if self.pages else np.array(array)  # a sanitizer's own malloc
        self.kept.append(copy)
        return copy

    def memory(self, size):
        # On a line of the cache, as Memory is.
        room = self.array(np.zeros(-(-size // 64) * 64, dtype=np.uint8))
        return SimpleNamespace(address=room.ctypes.data, size=size, bytes=room)


def with_distances(dtype, window=None):
    """Limited keys, a softcap, and distances up to the longest text exactly."""

    def add(builder):
        builder.embed(tensor_of(numbers((VOCABULARY, 4 * 32), dtype)))
        builder.norm(copied(), 128)
        builder.heads(identity(128))
        distances = numbers((2, 2 * 150 - 1), "float32")
        builder.attention(heads=2, kv_heads=1, dim=32, scale=0.2, softcap=20.0, distances=distances, window=window)
        builder.o_proj(linear(integers((32, 64)), integers(32)))
        builder.norm(copied(), 32)

    return add


def run(isa, guards, *, beyond):
    texts = 0
    dtype = PRECISIONS[isa]
    models = [
        *(partial(make, dtype=dtype, positions=1300) for make in MODELS.values()),
        with_distances(dtype),
        with_distances(dtype, window=40),
        partial(gates, dtype=dtype),
    ]
    for model, int8 in [*((model, "none") for model in models), (models[0], "all")]:
        encoder = built(kernels_of(dtype, isa, int8=int8), model)
        for lengths in ([1], [5], [150], [1, 33, 64, 7, 149], [1] * 70):
            tokens = sum(lengths)
            random = np.random.default_rng(tokens)
            ids = random.integers(0, VOCABULARY, tokens).astype(np.int32)
            ids[-1] = VOCABULARY - 1
            types = guards.array(np.full(tokens, 1, dtype=np.int32))
            keys = guards.array(np.array([max(1, length - 3) for length in lengths], dtype=np.int32))
            skip = guards.array(np.array([length - 1 for length in lengths], dtype=np.int32))
            last = int(beyond)  # a text that goes one token beyond the ids
            bounds, ids = guards.array(bounds_of([*lengths[:-1], lengths[-1] + last])), guards.array(ids)
            for rows in READINGS:
                for threads, block in ((1, 512), (1, 64), (3, 64)):
                    count = int(bounds[-1]) if rows == structs.ALL_ROWS else len(lengths)
                    out = guards.array(np.zeros((count, encoder.plan.hidden), dtype=np.float32))
                    call = structs.EncodeCall(
                        model=encoder.model,
                        ids=ids.ctypes.data,
                        bounds=bounds.ctypes.data,
                        types=types.ctypes.data,
                        keys=keys.ctypes.data,
                        skip=skip.ctypes.data if rows in (structs.FIRST_ROW, structs.MEAN_ROW) else None,
                        out=out.ctypes.data,
                        texts=len(lengths),
                        reading=rows,
                        block=block,
                        threads=threads,
                    )
                    address = ctypes.addressof(call)
                    room = guards.memory(threads * encoder.plan.kernels.workspace(address))
                    call.workspace = room.address
                    assert encoder.plan.kernels.encode(address) == 0
                    assert np.isfinite(out).all() and (out != 0).any(axis=1).all()
                    del guards.kept[-2:]
                    texts += len(lengths)
    return texts


def guard(guards):
    """Let each weight and table of a plan, and each workspace, have memory of its own."""
    right, tables = WeightPacker.pack, Rotation.tables

    def pack(self):
        packings = self._packings
        for self._packings in ([packing] for packing in packings):
            right(self)
        self._packings = packings

    weight_packer.Memory = encoders.Memory = guards.memory
    plan.smoothed_norms = lambda *_: []  # factors lie behind a weight, which is packed alone here
    WeightPacker.pack = lambda self, identity, **_: pack(self) or {}
    WeightPacker._kept = lambda self, array: guards.array(array).ctypes.data
    rotation._FIRST = 150  # the longest text
    Rotation.tables = lambda self, count: tuple(guards.array(table) for table in tables(self, count))


def main(isa, kind, *rest):
    beyond = "--beyond" in rest
    if rest and rest[0] != "--beyond":
        library.LIBRARY = Path(rest[0])
        for loaded in (library._load, library._fill, library.kernel_table, library.library):
            loaded.cache_clear()
    assert library.kernel_table(isa) is not None, library.unavailable()
    guards = Guards(kind)
    guard(guards)
    print(run(isa, guards, beyond=beyond), "texts")


# --- Tiles, emulated and built with AddressSanitizer, on memory of exactly the sizes that they ask for ----------------


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
    """For weights, which are packed into zeros."""

    def __init__(self, size):
        super().__init__(size)
        ctypes.memset(self.address, 0, size)


def run_tiles(folder):
    table = emulated_table(Path(folder), "-fsanitize=address", "-g1", "-O1")
    encoders.Memory, weight_packer.Memory = ExactMemory, WeightMemory
    for model in tests.EXACT_MODELS:
        kernels = tests.kernels_in(table, model.pop("int8", "none"))
        built = tests.encoder_of(kernels, **model)
        for lengths in ([1], [15, 1], [16], [17, 16], [31, 33, 2], [70, 5], [300]):
            for built.block in (32, 256):
                for threads, rows in ((1, "all"), (2, "mean"), (2, "last")):
                    built._workspaces.clear()
                    ids, bounds = tests.ids_of(lengths), bounds_of(lengths)
                    out = built.encode(ids, bounds, rows=rows, threads=threads)
                    assert np.isfinite(out).all()
    library.kernel_table = lambda highest=None: table
    run_attention()


def run_attention():
    """That of the torch backend, in tiles."""
    import torch

    from millpond.backends.torch.attention import native as attention
    from millpond.backends.torch.attention.segments import Segments
    from millpond.backends.torch.attention.signature import Masking

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
    run_tiles(sys.argv[2]) if sys.argv[1] == "tiles" else main(*sys.argv[1:])
