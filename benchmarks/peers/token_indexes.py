"""millpond's exact kernels and indexes, as the other engines of ``token_peers``: token states in, rankings out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from millpond import Ragged
from peers import token_operations
from peers.token_peers import Built, Search, best, folder_size
from peers.token_states import FloatArray, TokenStates

K = 10
# Documents that the first stage keeps; None is the index's own number.
CANDIDATES = (None, 64, 256, 4096)
# Passages above which MemoryIndex finds its candidates by centroid codes.
CODES_ABOVE = 20_000


def exact(states: TokenStates, folder: Path, *, codec: str) -> Built:
    """The exact kernel over packed rows, and the best of its scores."""
    from millpond.late_interaction.codecs.rows import CODECS as ROW_CODECS
    from millpond.late_interaction.scoring.exact import Tokens, score

    rows, scales = _packed(ROW_CODECS[codec].pack, states)
    tokens = Tokens(codec=ROW_CODECS[codec], rows=rows, scales=scales, offsets=np.asarray(states.offsets))

    def search(query: FloatArray) -> list[int]:
        return best(score(ragged_of(query), tokens)[0])

    size = rows.nbytes + (scales.nbytes if scales is not None else 0)

    def threads() -> dict[str, Any]:
        return token_operations.threads(search, states.queries)

    return Built(settings={"": search}, stored=size, scanned={"": size}, more={"threads": threads})


def _packed(pack: Any, states: TokenStates) -> tuple[Any, Any]:
    """Packed rows of all documents; the float32 rows of one piece at a time are in memory."""
    rows = scales = None
    for start in range(0, len(states.flat), 1 << 18):
        piece, piece_scales = pack(np.asarray(states.flat[start : start + (1 << 18)], np.float32))
        if rows is None:
            rows = np.empty((len(states.flat), piece.shape[1]), piece.dtype)
            scales = None if piece_scales is None else np.empty(len(states.flat), piece_scales.dtype)
        rows[start : start + len(piece)] = piece
        if scales is not None:
            scales[start : start + len(piece)] = piece_scales
    return rows, scales


def torch_bfloat16(states: TokenStates, folder: Path) -> Built:
    """The same without kernels: a matrix product of torch in bfloat16, and the maximum of each document."""
    import torch

    rows = torch.from_numpy(np.array(states.flat)).bfloat16()
    lengths = torch.from_numpy(np.diff(states.offsets))

    def search(query: FloatArray) -> list[int]:
        similarities = rows @ torch.from_numpy(query).bfloat16().T  # [tokens, rows of the query]
        scores = torch.segment_reduce(similarities.float(), "max", lengths=lengths).sum(1)
        return best(scores.numpy())

    return Built(settings={"": search}, stored=2 * rows.numel(), scanned={"": 2 * rows.numel()})


def memory(states: TokenStates, folder: Path, *, codec: str) -> Built:
    """MemoryIndex: exact, and with candidates by centroid codes."""
    from millpond.late_interaction import MemoryIndex

    index = MemoryIndex(None, codec)
    index.add_embeddings(ids_of(states), documents_of(states))
    size = index.stats().bytes
    # Below, every document is scored.
    candidates = _candidates(index) if len(states) > CODES_ABOVE else {}
    return Built(
        settings={"exact": searching(index, exact=True), **candidates},
        stored=size,
        scanned={"exact": size},
        more=_operations(index, states),
        close=index.close,
    )


def plaid(states: TokenStates, folder: Path, *, codec: str) -> Built:
    """PlaidIndex: one segment on disk, memory-mapped."""
    from millpond.late_interaction import PlaidIndex

    path = folder / "index"
    index = PlaidIndex(path, None, codec=codec)
    index.add_embeddings(ids_of(states), documents_of(states))
    index.compact()
    return Built(
        settings={**_candidates(index), "every document": searching(index, exact=True)},
        stored=index.stats().bytes,
        notes={"disk_bytes_per_token": folder_size(path) / max(1, len(states.flat))},
        more={
            "opened": partial(token_operations.opened, path, codec, states.queries[0]),
            **_operations(index, states),
        },
        close=index.close,
    )


def _operations(index: Any, states: TokenStates) -> dict[str, Callable[[], Any]]:
    search = searching(index)
    return {
        "threads": lambda: token_operations.threads(search, states.queries),
        "threads, exact": lambda: token_operations.threads(searching(index, exact=True), states.queries),
        "callers": lambda: token_operations.callers(search, states.queries),
        # Last, for they change the index.
        "writes": lambda: token_operations.writes(index, states),
    }


def _candidates(index: Any) -> dict[str, Search]:
    return {
        "default" if kept is None else f"candidates={kept}": searching(index, candidates=kept) for kept in CANDIDATES
    }


def searching(index: Any, **options: Any) -> Search:
    """A search for the ten best of ``index``, whose ids are those of :func:`ids_of`."""

    def search(query: FloatArray) -> list[int]:
        return [int(hit.id) for hit in index.search_embeddings(ragged_of(query), k=K, **options)[0]]

    return search


def ragged_of(matrix: FloatArray) -> Ragged:
    """One matrix as a Ragged."""
    return Ragged(flat=matrix, offsets=np.array([0, len(matrix)]))


def documents_of(states: TokenStates) -> Ragged:
    """All documents' rows."""
    return Ragged(flat=np.asarray(states.flat), offsets=np.asarray(states.offsets))


def ids_of(states: TokenStates) -> list[str]:
    """The index of each document as its id."""
    return [str(index) for index in range(len(states))]


INDEXES: Mapping[str, Callable[[TokenStates, Path], Built]] = {
    "exact-int8": partial(exact, codec="int8"),
    "exact-bfloat16": partial(exact, codec="bfloat16"),
    "torch-bfloat16": torch_bfloat16,
    "memory-int8": partial(memory, codec="int8"),
    "plaid-int8": partial(plaid, codec="int8"),
    "plaid-4": partial(plaid, codec="4"),
    "plaid-2": partial(plaid, codec="2"),
}
