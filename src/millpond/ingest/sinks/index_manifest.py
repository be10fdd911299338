"""IndexManifest: metadata of a collection of token matrices that records how its rows were made."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from millpond.errors import FingerprintMismatchError, InvalidRequestError
from millpond.ingest.sinks.manifest import readable
from millpond.late_interaction.encoding.muvera import Muvera
from millpond.late_interaction.encoding.projection import Projection
from millpond.late_interaction.index.settings import IndexSettings
from millpond.vectors.ragged import Ragged

FloatArray = npt.NDArray[np.float32]
Prefetch = Literal["muvera", "dense", "tokens"]

_SCHEMA = 1
_KIND = "late_interaction"


@dataclass(frozen=True, kw_only=True, eq=False)
class IndexManifest:
    """How the rows of a collection were made, stored in its metadata when it is created."""

    settings: IndexSettings  # model, width and pooling
    codec: str
    # What finds the candidates: one vector a document, or an index of the token rows; None scores every document.
    prefetch: Prefetch | None
    muvera: Muvera | None  # their encoding, of `"muvera"`

    @classmethod
    def of(cls, settings: IndexSettings, *, codec: str, prefetch: Prefetch | None) -> IndexManifest:
        """The manifest of a new collection; MUVERA with its default parameters."""
        muvera = Muvera(width=settings.width) if prefetch == "muvera" else None
        return cls(settings=settings, codec=codec, prefetch=prefetch, muvera=muvera)

    @property
    def prefetch_width(self) -> int:
        """Columns of the vector by which candidates are found; 0 without one."""
        if self.muvera is not None:
            return self.muvera.output_dimensions
        return self.settings.width if self.prefetch == "dense" else 0

    def check_options(self, *, codec: str, prefetch: Prefetch | None, collection: str) -> None:
        """Raises InvalidRequestError for another codec or prefetch than the collection has."""
        for name, value, stored in (("codec", codec, self.codec), ("prefetch", prefetch, self.prefetch)):
            if value != stored:
                raise InvalidRequestError(
                    f"collection {collection!r} was made with {name}={stored!r}, and this index has {name}={value!r}; "
                    f"pass {name}={stored!r}, or another collection name"
                )

    def encode_documents(self, documents: Ragged) -> FloatArray:
        """float32 ``[n, prefetch_width]``: the vectors by which documents are found; zeros without tokens."""
        return self._means(documents) if self.muvera is None else self.muvera.encode_documents(documents)

    def encode_queries(self, queries: Ragged) -> FloatArray:
        """float32 ``[n, prefetch_width]``: the vectors that documents are found by."""
        return self._means(queries) if self.muvera is None else self.muvera.encode_queries(queries)

    def _means(self, matrices: Ragged) -> FloatArray:
        """The mean of each matrix's rows, of length 1, if it is the prefetch."""
        means = np.zeros((len(matrices), self.prefetch_width), dtype=np.float32)
        for index, matrix in enumerate(matrices if self.prefetch_width else ()):
            if len(matrix):
                mean = matrix.mean(axis=0)
                means[index] = mean / max(float(np.linalg.norm(mean)), np.finfo(np.float32).tiny)
        return means

    def to_dict(self) -> dict[str, Any]:
        """The manifest as JSON."""
        projection = self.settings.projection
        stored = projection is not None and not projection.cuts
        return {
            "schema": _SCHEMA,
            "kind": _KIND,
            **self.settings.to_json(),
            "projection": base64.b64encode(projection.matrix.tobytes()).decode() if projection and stored else None,
            "codec": self.codec,
            "prefetch": self.prefetch,
            "muvera": None if self.muvera is None else self.muvera.parameters(),
        }

    @classmethod
    def from_dict(cls, data: object, *, collection: str) -> IndexManifest:
        """The manifest as read from a collection."""
        if isinstance(data, Mapping) and "kind" not in data and "dimensions" in data:
            raise FingerprintMismatchError(
                f"collection {collection!r} holds one vector for each text, as a sink writes them, and no token "
                "vectors; choose another collection name"
            )
        with readable(data, collection):
            if not isinstance(data, Mapping) or data["schema"] != _SCHEMA or data["kind"] != _KIND:
                raise ValueError("another schema")
            muvera = data["muvera"]
            return cls(
                settings=IndexSettings.from_json(data, _matrix(data)),
                codec=str(data["codec"]),
                prefetch=check_prefetch(data["prefetch"], (*get_args(Prefetch), None)),
                muvera=None if muvera is None else Muvera.from_parameters(muvera),
            )


def check_prefetch(prefetch: str | None, choices: tuple[Prefetch | None, ...]) -> Prefetch | None:
    """The prefetch of this name; raises InvalidRequestError for one that is not among the choices."""
    for known in choices:
        if prefetch == known:
            return known
    raise InvalidRequestError(f"prefetch={prefetch!r} is unknown; choose one of {', '.join(map(str, choices))}")


def _matrix(data: Mapping[str, Any]) -> Any:
    """The matrix of the projection to the index's width; ``None`` if that is the model's."""
    native, width = data["native"], data["width"]
    if data["projection"] is not None:
        flat = np.frombuffer(base64.b64decode(data["projection"], validate=True), dtype="<f4")
        return flat.astype(np.float32).reshape(native, width)
    return None if width == native else Projection.matryoshka(native, width).matrix
