"""MaxSim on CUDA in Triton, which compiles the kernel from this source on its first use."""

# Triton reads the function's source; its annotations and names are its own.
# mypy: ignore-errors
# ruff: noqa: N803

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["queries", "count"])
def maxsim(
    rows,  # [tokens, WIDTH at most]
    scales,  # [tokens]
    starts,  # [count]
    lengths,  # [count]
    query,  # [query tokens, WIDTH at most]
    query_scales,  # [query tokens]
    query_ends,  # [queries + 1]
    scores,  # [queries, count]
    queries,
    count,
    columns,
    SCALED: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERY_TOKENS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """One query and one document: the sum over the query's tokens of the greatest product with a document's token.

    Programs of all queries follow each other, so that they find the document in the cache. A NaN is not lost.
    """
    program = tl.program_id(0)
    document = program // queries
    which = program % queries
    start = tl.load(starts + document)
    length = tl.load(lengths + document).to(tl.int32)
    begin = tl.load(query_ends + which)
    tokens = (tl.load(query_ends + which + 1) - begin).to(tl.int32)
    column = tl.arange(0, WIDTH)
    wide = column < columns
    total = 0.0
    for first in range(0, tokens, QUERY_TOKENS):
        asked = first + tl.arange(0, QUERY_TOKENS)
        some = (asked < tokens)[:, None] & wide[None, :]
        q = tl.load(query + (begin + asked[:, None]) * columns + column, mask=some, other=0)
        q = q.to(rows.dtype.element_ty)  # exact: the codec has rounded it as the rows
        best = tl.full([QUERY_TOKENS], float("-inf"), tl.float32)
        broken = tl.zeros([QUERY_TOKENS], tl.int32)
        for place in range(0, length, TOKENS):
            token = place + tl.arange(0, TOKENS)
            known = token < length
            stored = tl.load(
                rows + (start + token[:, None]) * columns + column, mask=known[:, None] & wide[None, :], other=0
            )
            if SCALED:
                factor = tl.load(scales + start + token, mask=known, other=0.0).to(tl.float32)
                products = tl.dot(stored, tl.trans(q)).to(tl.float32) * factor[:, None]
            else:
                products = tl.dot(stored, tl.trans(q), input_precision="tf32x3")
            broken = tl.maximum(broken, tl.max((products != products).to(tl.int32), 0))
            products = tl.where(known[:, None], products, float("-inf"))
            best = tl.maximum(best, tl.max(products, 0))
        if SCALED:
            best *= tl.load(query_scales + begin + asked, mask=asked < tokens, other=0.0)
        best = tl.where(broken > 0, float("nan"), best)
        total += tl.sum(tl.where(asked < tokens, best, 0.0), 0)
    tl.store(scores + which.to(tl.int64) * count + document, total)
