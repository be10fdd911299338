"""Results: a batch's results, split by request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from millpond.engine.schedule.request import Request
from millpond.pooling.pooler import Matrix, OutputSpec

ReadRows = Mapping[OutputSpec, Sequence[Matrix]]  # by output, the rows of each sequence of a batch
RequestResult = tuple[Request, Matrix]  # the matrix is [d], or [tokens, d] for a per-token task


def split_results(requests: Sequence[Request], lead: int, read: ReadRows) -> list[RequestResult]:
    """Pair each request with its part of the batch's results."""
    results = []
    single = next(iter(read.values())) if len(read) == 1 else None  # as nearly always; a look-up hashes the output
    for i, request in enumerate(requests, lead):
        rows = (read[request.call.plan.output] if single is None else single)[i]
        results.append((request, rows if request.kept is None else rows[request.kept]))
    return results
