"""A look at the new collection before it serves: have the rows of a sample their texts, and the engine's vectors?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from millpond.errors import SinkError
from millpond.ingest.pipeline.comparison import has_content
from millpond.ingest.record import point_id
from millpond.migrate.row_copy import RowCopy
from millpond.vectors import matryoshka

if TYPE_CHECKING:
    from millpond.engine.engine import Engine

# Of a stored vector and the engine's: half precision has 0.99999, a byte per dimension 0.999.
_LEAST_COSINE = 0.99


def verify_sample(copy: RowCopy, engine: Engine) -> None:
    """Raise SinkError unless the sample of the last pass has the vectors of the engine.

    A row that was changed meanwhile is left to the next pass.

    Args:
        copy: What filled the collection.
        engine: The engine of its model.

    Raises:
        SinkError: Vectors are not the engine's.
    """
    sample, widths = copy.sample, copy.target.own().dimensions
    if not sample:
        return
    ids = [point_id(record.id, record.chunk) for record in sample]
    stored = copy.target.read_rows(ids, widths=widths)
    texts = [record.text for record in sample]
    rows = engine.embed(texts, role="document", dimensions=engine.spec.dimensions, normalize=False).embeddings
    wrong = set()
    for width in widths:
        cut = matryoshka.cut(rows, width, normalize=True)
        for row_id, record, computed in zip(ids, sample, cut, strict=True):
            row = stored.get(row_id)
            if row is None or not has_content(row, record):
                continue
            vector = row.vectors.get(width)  # a bit for each number cannot be read back
            if vector is not None and not _cosine(vector, computed) >= _LEAST_COSINE:
                wrong.add(row_id)
    if wrong:
        raise SinkError(
            f"{len(wrong)} of {len(ids)} vectors of collection {copy.target.collection!r} are not those of "
            f"{engine.spec.name}; nothing was cut over. Give the migration up by millpond migrate rollback and finish, "
            "and run it again"
        )


def _cosine(stored: Any, computed: Any) -> float:
    length = float(np.linalg.norm(stored))
    return float(stored @ computed) / length if length else 0.0
