"""VectorStorage: in which form Qdrant keeps the vectors of a collection, and how it searches that form."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from qdrant_client import models

from millpond.errors import InvalidRequestError
from millpond.ingest.sinks.batch import FloatArray
from millpond.ingest.sinks.fields import FieldLayout
from millpond_qdrant.url import QdrantOptions

Datatype = Literal["float32", "float16", "uint8"]
Quantization = Literal["scalar", "product", "binary"]
DATATYPES: tuple[Datatype, ...] = get_args(Datatype)
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)

_NAME = re.compile(r"d[0-9]+")  # of the vector of a width
_HNSW = ("m", "ef_construct", "ef")
# Rescoring the k hits of the copy alone would order them and find none that the copy missed.
_OVERSAMPLING = {"scalar": 2.0, "product": 4.0, "binary": 8.0}
# Of the values that scalar quantization scales to a byte; the others, the largest ones, are cut: steps are finer.
_QUANTILE = 0.99
# uint8: a value of 8 times the root of the mean square of a unit vector is the largest that is kept.
_CLIPPED = 8
_MIDDLE = 128


@dataclass(frozen=True, kw_only=True)
class VectorStorage:
    """What was asked of a collection, named as a sink's options; ``None`` leaves it as it is, or as Qdrant has it."""

    datatype: Datatype | None = None
    index_quantization: Quantization | None = None
    rescore: bool = True
    oversampling: float | None = None
    on_disk: bool | None = None
    hnsw: Mapping[str, int] | None = None

    @classmethod
    def of(cls, fields: FieldLayout, options: QdrantOptions) -> VectorStorage:
        """Check the options of a sink."""
        oversampling, rescore, hnsw = options.get("oversampling"), options.get("rescore", True), options.get("hnsw")
        kind = _one_of("datatype", options.get("datatype"), DATATYPES)
        check_layout(kind, fields)
        if oversampling is not None and (
            isinstance(oversampling, bool) or not isinstance(oversampling, int | float) or not 1 <= oversampling < 1000
        ):
            raise InvalidRequestError(f"oversampling={oversampling!r} must be a number from 1, as 2.0")
        if oversampling is not None and not rescore:
            raise InvalidRequestError(
                f"oversampling={oversampling!r} with rescore=False has no effect; leave one of them out"
            )
        for name, value in dict(hnsw or {}).items():
            if name not in _HNSW or isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InvalidRequestError(
                    f"hnsw={dict(hnsw or {})!r}: {name}={value!r}; it takes ints named {', '.join(_HNSW)}"
                )
        return cls(
            datatype=kind,
            index_quantization=_one_of("index_quantization", options.get("index_quantization"), QUANTIZATIONS),
            rescore=rescore,
            oversampling=oversampling,
            on_disk=options.get("on_disk"),
            hnsw=None if hnsw is None else dict(hnsw),
        )

    @property
    def only_on_servers(self) -> dict[str, Any]:
        """The arguments that local mode stores and does not follow."""
        asked = {
            "datatype": None if self.datatype == "float32" else self.datatype,
            "index_quantization": self.index_quantization,
            "oversampling": self.oversampling,
            "on_disk": self.on_disk or None,
            "hnsw": self.hnsw,
        }
        return {name: value for name, value in asked.items() if value is not None}

    def params(self, width: int) -> models.VectorParams:
        """The vectors of a width in a new collection."""
        graph = self.hnsw or {}
        return models.VectorParams(
            size=width,
            distance=models.Distance.EUCLID if self.datatype == "uint8" else models.Distance.COSINE,
            datatype=None if self.datatype is None else models.Datatype(self.datatype),
            quantization_config=None if self.index_quantization is None else _quantized(self.index_quantization),
            on_disk=self.on_disk,
            hnsw_config=models.HnswConfigDiff(m=graph.get("m"), ef_construct=graph.get("ef_construct"))
            if graph.keys() & {"m", "ef_construct"}
            else None,
        )

    def check_stored(self, stored: StoredVectors, *, collection: str) -> None:
        """Raise InvalidRequestError if a collection was created with another datatype or quantization than asked."""
        for name, asked, has in (
            ("datatype", self.datatype, stored.datatype),
            ("index_quantization", self.index_quantization, stored.quantization),
        ):
            if asked is not None and asked != has:
                raise InvalidRequestError(
                    f"collection {collection!r} was created with {name}={has!r}, and this sink asks for "
                    f"{name}={asked!r}; leave {name} out to use the collection as it is, or pass another collection "
                    "name"
                )

    def search(self, stored: StoredVectors, *, stage: Literal["coarse", "full", "only"]) -> models.SearchParams | None:
        """How to search: the coarse stage by the quantized vectors alone, the one after by the vectors themselves."""
        quantization = None
        if stored.quantization is not None:
            if not self.rescore or stage == "coarse":
                quantization = models.QuantizationSearchParams(rescore=False)
            elif stage == "full":  # of the candidates that the first stage found, each is scored
                quantization = models.QuantizationSearchParams(ignore=True)
            else:
                oversampling = self.oversampling or _OVERSAMPLING.get(stored.quantization)
                quantization = models.QuantizationSearchParams(rescore=True, oversampling=oversampling)
        ef = (self.hnsw or {}).get("ef")
        if quantization is None and ef is None:
            return None
        return models.SearchParams(hnsw_ef=ef, quantization=quantization)


@dataclass(frozen=True, kw_only=True)
class StoredVectors:
    """The form of the vectors of a collection that exists, and of the copy by which Qdrant searches."""

    datatype: str = "float32"
    quantization: str | None = None

    @classmethod
    def of(cls, config: models.CollectionConfig) -> StoredVectors:
        """Read the configuration of a collection; the vectors of all widths have the same."""
        vectors = config.params.vectors
        named = (
            [params for name, params in vectors.items() if _NAME.fullmatch(name)] if isinstance(vectors, dict) else []
        )
        if not named:
            return cls()
        quantized = named[0].quantization_config or config.quantization_config
        return cls(
            datatype="float32" if named[0].datatype is None else str(named[0].datatype.value),
            quantization=None if quantized is None else type(quantized).__name__.removesuffix("Quantization").lower(),
        )

    def encode(self, rows: FloatArray) -> FloatArray:
        """Unit vectors ``[n, width]`` as they are stored.

        Qdrant keeps the integer part of a float in 0 to 255. The cosine of such vectors is that of their distance from
        the corner; their Euclidean distance is that of the unit vectors, so these collections have that.
        """
        if self.datatype != "uint8":
            return rows
        steps = np.rint(rows * np.float32(_scale(rows.shape[1]))) + np.float32(_MIDDLE)
        return np.asarray(np.clip(steps, 0, 255), dtype=np.float32)

    def decode(self, row: Any, width: int) -> FloatArray:
        """A stored vector ``[width]``, as the client returns it, as a unit vector."""
        values = np.asarray(row, dtype=np.float32)
        if self.datatype == "uint8":
            values = (values - _MIDDLE) / np.float32(_scale(width))
        return np.asarray(values / max(float(np.linalg.norm(values)), 1e-12), dtype=np.float32)

    def cosine(self, score: float, width: int) -> float:
        """The cosine that a score of Qdrant's stands for."""
        if self.datatype != "uint8":
            return score
        return 1 - (score / _scale(width)) ** 2 / 2


def check_layout(datatype: str | None, fields: FieldLayout) -> None:
    """Raise InvalidRequestError for vectors of bytes in a framework's layout."""
    if datatype == "uint8" and fields != "plain":
        raise InvalidRequestError(
            f"datatype='uint8' with fields={fields!r}: a framework searches with vectors that are not in 0 to "
            "255, and would find noise; use float16, or fields='plain'"
        )


def _scale(width: int) -> float:
    """Steps of uint8 for 1.0."""
    return 127 * max(1.0, math.sqrt(width) / _CLIPPED)


def _quantized(kind: Quantization) -> models.QuantizationConfig:
    match kind:
        case "scalar":
            scalar = models.ScalarQuantizationConfig(type=models.ScalarType.INT8, quantile=_QUANTILE, always_ram=True)
            return models.ScalarQuantization(scalar=scalar)
        case "product":
            product = models.ProductQuantizationConfig(compression=models.CompressionRatio.X16, always_ram=True)
            return models.ProductQuantization(product=product)
        case "binary":
            return models.BinaryQuantization(binary=models.BinaryQuantizationConfig(always_ram=True))


def _one_of(name: str, value: str | None, known: Sequence[Any]) -> Any:
    if value is not None and value not in known:
        raise InvalidRequestError(f"{name}={value!r} is unknown; choose one of {', '.join(known)}, or leave it out")
    return value
