"""Listwise rerankers: one text with a query and all of its documents, of which some rows are projected and compared.

jina-reranker-v3 and v3.5: a causal language model without a head. A marker ends each document, and another the query;
two linears project the rows of the markers, and a score is the cosine of a document's row and the query's. Since each
document attends to those before it, a score depends on the list.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millpond.checkpoints.modules import Dense
from millpond.checkpoints.templates.score_template import ScoreTemplate, shipped_template
from millpond.checkpoints.weights import tensor_shapes
from millpond.errors import WeightMismatchError

# The class in config.json.
_CLASS = "JinaForRanking"
_PROJECTOR = ("projector.0.weight", "projector.2.weight")


@dataclass(frozen=True, kw_only=True)
class Listwise:
    """How a list is read and scored."""

    template: ScoreTemplate  # renders a query and its documents, with the markers
    document_marker: str = "<|embed_token|>"  # the token at the end of each document
    query_marker: str = "<|rerank_token|>"  # the token at the end of the query; of several the last is read
    most_documents: int = 125  # of one text
    document_length: int  # most tokens of a document
    query_length: int  # most tokens of a query


def read_listwise(folder: Path, config: Mapping[str, Any]) -> tuple[Listwise, tuple[Dense, ...]] | None:
    """A listwise reranker and its projection; ``None`` for any other checkpoint."""
    if (config.get("architectures") or [None])[0] != _CLASS:
        return None
    # v3.5 has windows in some layers, and for the documents' sake a marker at the query's first place, too.
    newer = "sliding_attention" in (config.get("layer_types") or ())
    template = shipped_template("jina-reranker-v3", special_tokens=False).bound({"early_query": newer})
    documents, query = (8192, 1024) if newer else (2048, 512)
    how = Listwise(template=template, document_length=documents, query_length=query)
    return how, _read_projection(folder)


def _read_projection(folder: Path) -> tuple[Dense, ...]:
    shapes = tensor_shapes(folder)
    for name in _PROJECTOR:
        if len(shapes.get(name, ())) != 2:
            raise WeightMismatchError(
                f"{folder} calls itself a {_CLASS}, and has no {name}, its projection; is the checkpoint complete?"
            )
    return tuple(
        Dense(
            folder=folder,
            in_features=shapes[name][1],
            out_features=shapes[name][0],
            bias=False,
            activation=f"torch.nn.{activation}",
            residual=False,
            weight=name,
        )
        for name, activation in zip(_PROJECTOR, ("ReLU", "Identity"), strict=True)
    )
