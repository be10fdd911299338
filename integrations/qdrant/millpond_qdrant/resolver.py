"""Resolver: qdrant-client's traversal of points and queries, with engines for its documents."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any, get_args

from qdrant_client import models
from qdrant_client.embed.common import INFERENCE_OBJECT_TYPES
from qdrant_client.embed.model_embedder import ModelEmbedder

from millpond.errors import InvalidRequestError
from millpond_qdrant.inference import LocalModels

_DOCUMENTS = get_args(INFERENCE_OBJECT_TYPES)
Key = tuple[str, str, str]


class Resolver(ModelEmbedder):
    """Puts vectors in place of documents. Its state is that of one call, so each call has one of its own.

    qdrant-client hands vectors out in the order of its traversal, which is wrong where an object stands in two places
    of a request; here a document finds its vector by what it says.
    """

    def __init__(self, parser: Any, local_models: LocalModels) -> None:
        super().__init__(parser=parser, is_local_mode=False)  # in local mode it asks for fastembed
        self._local_models = local_models
        self._vectors: dict[Key, Any] = {}

    def _embed_accumulator(self, is_query: bool = False, inference_batch_size: int = 0) -> None:
        """Embed the documents of a batch: all that have a model and options in common by one call."""
        groups: dict[tuple[str, str], dict[str, models.Document]] = defaultdict(dict)
        for documents in self._batch_accumulator.values():
            for each in documents:
                if not isinstance(each, models.Document):
                    raise InvalidRequestError(
                        f"model={each.model!r} is asked for an image, and millpond reads texts alone"
                    )
                *group, text = _key(each)
                groups[tuple(group)][text] = each  # type: ignore[index]
        self._vectors = {}
        for (name, options), by_text in groups.items():
            given = next(iter(by_text.values())).options
            vectors = self._local_models.embed(name, list(by_text), given, is_query=is_query)
            self._vectors |= {(name, options, text): vector for text, vector in zip(by_text, vectors, strict=True)}
        self._batch_accumulator.clear()

    def _drain_accumulator(self, data: Any, is_query: bool, inference_batch_size: int = 0) -> Any:
        """A document's vector; of a dict or a list, those of all documents in it."""
        if not isinstance(data, _DOCUMENTS):
            return super()._drain_accumulator(data, is_query, inference_batch_size)
        if self._batch_accumulator:
            self._embed_accumulator(is_query)
        return self._vectors[_key(self._resolve_inference_object(data))]

    def _resolve_inference_object(self, data: Any) -> Any:
        """Of an object of any kind the document that it is."""
        if not isinstance(data, models.InferenceObject):
            return data
        if not isinstance(data.object, str):
            kind = type(data.object).__name__
            raise InvalidRequestError(
                f"model={data.model!r} is asked for an object of type {kind}, and reads texts alone"
            )
        return models.Document(text=data.object, model=data.model, options=data.options)


def _key(document: models.Document) -> Key:
    return document.model, json.dumps(document.options, sort_keys=True, default=repr), document.text
