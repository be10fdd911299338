"""MillpondTransform: the embedding step of an ingestion pipeline, which loses no vector and no node."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from typing import Any
from uuid import uuid4

import numpy as np
from llama_index.core.schema import BaseNode, MetadataMode

from llama_index.embeddings.millpond.base import MillpondEmbedding
from llama_index.embeddings.millpond.failures import Failures
from llama_index.embeddings.millpond.source import listed
from millpond.compat.adapter import PathStr
from millpond.errors import (
    CacheError,
    DeviceLostError,
    EngineClosedError,
    EngineOverloadedError,
    MillpondError,
    ModelLoadError,
)
from millpond.ingest.sinks.batch import storable
from millpond.support.blank import is_blank

_logger = logging.getLogger(__name__)

# Errors that no text causes.
_FATAL = (CacheError, EngineClosedError, EngineOverloadedError, ModelLoadError)

# Yields texts to embed; it is sent their vectors, or thrown the error of the attempt.
Steps = Generator[list[str], list[list[float]], list[BaseNode]]


class MillpondTransform(MillpondEmbedding):
    """The last transformation of an ``IngestionPipeline``: embeds nodes, with the guarantees of ``millpond.ingest``.

    - Every vector is in the file ``cache`` soon after it is computed. After a kill, the same run computes the rest,
      whatever the pipeline's own cache and its docstore have forgotten.
    - A node that cannot be embedded costs no other node its vector. All others are embedded; then an error names it,
      before the pipeline writes anything to its stores, and the next run computes this node only. With
      ``dead_letters``, such nodes are written to this file, from which :func:`millpond.ingest.read` reads them, and
      left out, and the pipeline goes on.
    - Nodes without a visible character are left out: their vectors are near to many questions.

    It serves as the embedding model of queries, too. The other fields: :class:`MillpondEmbedding`.

    Attributes:
        cache: The file of the vectors; required, unless ``engine`` has one.
        dead_letters: The file for nodes that cannot be embedded.
    """

    dead_letters: PathStr | None = None

    def _check_source(self) -> None:
        super()._check_source()
        if self.cache is None and (self.engine is None or self.engine.cache is None):
            raise ValueError(
                f"{type(self).__name__} needs cache=, a file in which vectors survive the process; with engine=, make "
                "that engine with it"
            )

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Embed nodes, in place.

        Args:
            nodes: The nodes.
            **kwargs: As of every embedding model.

        Returns:
            The nodes with their vectors, in order, without those that are left out.

        Raises:
            InvalidRequestError: Some nodes cannot be embedded, and there is no file for them.
            MillpondError: The engine fails, whatever the texts.
        """
        steps = self._steps(nodes)
        try:
            texts = next(steps)
            while True:
                try:
                    vectors = self.get_text_embedding_batch(texts, **kwargs)
                except Exception as error:
                    texts = steps.throw(error)
                else:
                    texts = steps.send(vectors)
        except StopIteration as done:
            return list(done.value)

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """As :meth:`__call__`, without blocking the event loop."""
        steps = self._steps(nodes)
        try:
            texts = next(steps)
            while True:
                try:
                    vectors = await self.aget_text_embedding_batch(texts, **kwargs)
                except Exception as error:
                    texts = steps.throw(error)
                else:
                    texts = steps.send(vectors)
        except StopIteration as done:
            return list(done.value)

    def _steps(self, nodes: Sequence[BaseNode]) -> Steps:
        """What both calls do; a batch that fails is embedded again by halves."""
        given, failures = listed(nodes, "MillpondTransform", "nodes"), Failures(self.dead_letters)
        contents = [node.get_content(metadata_mode=MetadataMode.EMBED) for node in given]
        chosen = [index for index, text in enumerate(contents) if not is_blank(text)]
        if len(chosen) < len(given):
            _logger.warning("%d of %d nodes are blank and left out", len(given) - len(chosen), len(given))
        size = self.embed_batch_size
        parts = [chosen[start : start + size] for start in range(0, len(chosen), size)]
        while parts:
            part = parts.pop(0)
            try:
                vectors = yield [contents[index] for index in part]
            except _FATAL:
                raise
            except (MillpondError, RuntimeError) as error:  # of one text, or of the forward of its batch
                if len(part) > 1:
                    parts[:0] = [part[: len(part) // 2], part[len(part) // 2 :]]
                    continue
                yield [f"probe {uuid4()}"]  # fails, too, if options or engine are at fault, and is in no cache
                if isinstance(error, DeviceLostError):
                    parts.insert(0, part)  # for another device
                else:
                    failures.add(part[0], str(error) or repr(error))
                continue
            good = storable(np.array(vectors, dtype=np.float32))
            for index, vector, stored in zip(part, vectors, good, strict=True):
                if stored:
                    given[index].embedding = vector
                else:
                    failures.add(index, "its vector is not finite, or all zero")
        failures.settle(given)
        return [given[index] for index in chosen if index not in failures]
