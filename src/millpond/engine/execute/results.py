"""Results: a batch's results, split by request."""

from __future__ import annotations

from millpond.backends.backend import Matrix, ReadRows
from millpond.engine.execute.packing import PackedRequests
from millpond.engine.schedule.request import Request

RequestResult = tuple[Request, Matrix]  # the matrix is [d], or [tokens, d] for a per-token task


def split_results(packed: PackedRequests, read: ReadRows) -> list[RequestResult]:
    """Pair each request with its part of the batch's results."""
    results = []
    single = next(iter(read.values())) if len(read) == 1 else None  # as nearly always; a look-up hashes the output
    for i, request in enumerate(packed.requests, packed.lead):
        rows = (read[request.call.plan.output] if single is None else single)[i]
        results.append((request, rows if request.kept is None else rows[request.kept]))
    return results
