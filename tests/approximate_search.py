"""Data for the tests of approximate search: clustered unit rows, documents of given lengths, guarded memory."""

import ctypes
import mmap

import numpy as np

WIDTHS = (1, 2, 3, 7, 16, 50, 96, 128, 131)
QUERY_TOKENS = (0, 1, 15, 16, 17, 32, 33, 48, 64, 65, 100)
# Each width and each length once or twice; all pairs find no more, since kernels tile them by themselves.
TOKENS_AND_WIDTHS = [(tokens, WIDTHS[place % len(WIDTHS)]) for place, tokens in enumerate(QUERY_TOKENS)]

_libc = ctypes.CDLL(None, use_errno=True)


def unit(rows):
    """Rows of length 1."""
    return (rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-12)).astype(np.float32)


def clustered(count, dim, *, clusters=40, spread=0.6, seed=0):
    """Unit rows ``[count, dim]`` around random directions."""
    random = np.random.default_rng(seed)
    centers = unit(random.standard_normal((clusters, dim)))
    noise = random.standard_normal((count, dim)) * spread / np.sqrt(dim)
    return unit(centers[random.integers(clusters, size=count)] + noise)


def offsets_of(lengths):
    """int64 offsets of documents of these lengths."""
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)


def lengths_of(tokens, *, longest=40, seed=0):
    """Lengths 0 to ``longest`` whose sum is ``tokens``, several of them 0."""
    lengths, left, random = [0, 0], tokens, np.random.default_rng(seed)
    while left:
        lengths.append(min(int(random.integers(0, longest + 1)), left))
        left -= lengths[-1]
    return [*lengths, 0]


def packed_bits(mask):
    """The bitmap of a mask; the bits behind its last document are set, and must be ignored."""
    padded = np.ones(-(-len(mask) // 8) * 8, dtype=np.bool_)
    padded[: len(mask)] = mask
    return np.packbits(padded, bitorder="little")


def guarded(array):
    """A read-only copy of an array whose last byte is the last before memory that may not be touched."""
    page = mmap.PAGESIZE
    size = -(-max(array.nbytes, 1) // page) * page
    memory = mmap.mmap(-1, size + page)
    room = np.frombuffer(memory, dtype=np.uint8)
    start = size - array.nbytes
    room[start:size] = np.frombuffer(np.ascontiguousarray(array).tobytes(), dtype=np.uint8)
    last = ctypes.c_void_p(room.ctypes.data + size)
    assert _libc.mprotect(last, ctypes.c_size_t(page), mmap.PROT_NONE if hasattr(mmap, "PROT_NONE") else 0) == 0
    copy = room[start:size].view(array.dtype).reshape(array.shape)
    copy.flags.writeable = False
    return copy


def maxsim(query, rows, offsets):
    """MaxSim in float64: ``-inf`` for a document without tokens, and 0 if the query has none."""
    similarities = np.asarray(query, dtype=np.float64) @ np.asarray(rows, dtype=np.float64).T  # [query tokens, tokens]
    scores = np.zeros(len(offsets) - 1)
    for i in range(len(scores) if len(query) else 0):
        part = similarities[:, offsets[i] : offsets[i + 1]]
        scores[i] = part.max(axis=1).sum() if part.size else -np.inf
    return scores
