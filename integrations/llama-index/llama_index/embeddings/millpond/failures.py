"""Nodes that cannot be embedded: named in an error, or kept in a dead-letter file."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence

from llama_index.core.schema import BaseNode, MetadataMode

from millpond.errors import InvalidRequestError
from millpond.ingest import Record, Rejected, read
from millpond.ingest.pipeline.dead_letter_file import DeadLetterFile
from millpond.ingest.sources.json_file import dump_record, dump_rejected

_logger = logging.getLogger(__name__)

_NAMED = 5  # nodes that a message names


class Failures:
    """The nodes of a run that cannot be embedded, and the file for them, which must be one from the beginning on."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._letters = None if path is None else DeadLetterFile(path)
        self._reasons: dict[int, str] = {}

    def add(self, index: int, reason: str) -> None:
        """Note a node by its place in the run."""
        self._reasons[index] = reason

    def __contains__(self, index: int) -> bool:
        return index in self._reasons

    def settle(self, nodes: Sequence[BaseNode]) -> None:
        """Write the nodes to the file; without one, raise InvalidRequestError that names them."""
        if not self._reasons:
            return
        failed = [(nodes[index], reason) for index, reason in sorted(self._reasons.items())]
        named = "; ".join(f"{node.node_id!r}: {reason}" for node, reason in failed[:_NAMED])
        more = "; ..." if len(failed) > _NAMED else ""
        message = f"{len(failed)} of {len(nodes)} nodes cannot be embedded ({named}{more})"
        if self._letters is None:
            raise InvalidRequestError(
                f"{message}; the vectors of the others are in the cache: mend these nodes and run again, or leave such "
                "nodes out with dead_letters='dead.jsonl'"
            )
        for node, reason in failed:
            self._letters.add(_letter(node, reason))
        self._letters.close()
        _logger.warning("%s; they are left out, and in %s", message, self._letters.path)


def _letter(node: BaseNode, reason: str) -> str:
    where = f"node {node.node_id!r} of document {node.ref_doc_id!r}"
    (record,) = read([node])
    if isinstance(record, Record):
        return dump_record(record, where=where, reason=reason)
    # It is no record, for the same reason; whoever mends it finds all of it.
    row = {"id": node.node_id, "text": node.get_content(metadata_mode=MetadataMode.NONE), "metadata": node.metadata}
    return dump_rejected(Rejected(where=where, reason=reason, content=json.dumps(row, default=str)))
