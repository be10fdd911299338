"""VectorOptions: how a collection of Milvus stores and indexes its vectors."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
from pymilvus import DataType

from millpond.errors import FingerprintMismatchError, InvalidRequestError, MissingExtraError
from millpond.support.metadata import check_str
from millpond_milvus.versions import BM25, HALF_VECTORS, INT8_VECTORS, QUANTIZED_HNSW, RABITQ, Need

OPTIONS_KEY = "millpond.options"
"""The collection's property that holds the options which differ from the default ones."""

SPARSE = "sparse"
"""The field of sparse vectors."""

PARTITION = "partition"
"""The field of the partition key."""

_TYPES = {
    "float32": DataType.FLOAT_VECTOR,
    "float16": DataType.FLOAT16_VECTOR,
    "bfloat16": DataType.BFLOAT16_VECTOR,
    "int8": DataType.INT8_VECTOR,
}
_QUANTIZATIONS = ("scalar", "product", "binary")
# For each family of index, what Milvus calls it without quantization and with each.
_INDEXES: Mapping[str, Mapping[str | None, str]] = {
    "AUTOINDEX": {None: "AUTOINDEX"},
    "FLAT": {None: "FLAT"},
    "HNSW": {None: "HNSW", "scalar": "HNSW_SQ", "product": "HNSW_PQ"},
    "IVF": {None: "IVF_FLAT", "scalar": "IVF_SQ8", "product": "IVF_PQ", "binary": "IVF_RABITQ"},
}
_FAMILIES = {None: "AUTOINDEX", "scalar": "HNSW", "product": "HNSW", "binary": "IVF"}
_MOST_PARTITIONS = 1024
# Options that a collection stores by another name.
_STORED_NAMES = {"index_quantization": "quantization"}
_NAMES = {stored: name for name, stored in _STORED_NAMES.items()}

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class VectorOptions:
    """Data type, index and partition key, named as a sink's options; lexical: Milvus makes sparse vectors (BM25)."""

    datatype: str = "float32"
    index_type: str | None = None
    index_quantization: str | None = None
    partition_key: str | None = None
    partitions: int | None = None
    lexical: bool = False

    def __post_init__(self) -> None:
        for name, known in (
            ("datatype", [*_TYPES]),
            ("index_quantization", [None, *_QUANTIZATIONS]),
            ("index_type", [None, *_INDEXES]),
        ):
            if (value := getattr(self, name)) not in known:
                choice = ", ".join(each for each in known if each)
                raise InvalidRequestError(f"{name}={value!r} is unknown; choose one of {choice}")
        if self.index_quantization not in _INDEXES[self._family]:
            fitting = [name for name, kinds in _INDEXES.items() if self.index_quantization in kinds]
            raise InvalidRequestError(
                f"index_type={self.index_type!r} has no index_quantization={self.index_quantization!r}; choose one of "
                f"{', '.join(fitting)}, or leave it out"
            )
        if self.datatype == "int8" and (self.index_quantization is not None or self._family == "IVF"):
            raise InvalidRequestError(
                "datatype='int8' is indexed by AUTOINDEX, FLAT or HNSW without quantization; leave the others out"
            )
        if self.datatype == "bfloat16":
            _bfloat16()
        if self.partition_key is not None:
            check_str("partition_key", self.partition_key)
        if self.partitions is not None and (
            self.partition_key is None
            or isinstance(self.partitions, bool)
            or not isinstance(self.partitions, int)
            or not 1 <= self.partitions <= _MOST_PARTITIONS
        ):
            raise InvalidRequestError(
                f"partitions={self.partitions!r} must be an int from 1 to {_MOST_PARTITIONS}, beside a partition_key"
            )

    @classmethod
    def from_property(cls, text: str | None, *, collection: str) -> VectorOptions:
        """The options that a collection was created with."""
        try:
            stored = json.loads(text) if text else {}
            return cls(**{_NAMES.get(name, name): value for name, value in stored.items()})
        except (AttributeError, TypeError, ValueError) as error:
            raise FingerprintMismatchError(
                f"collection {collection!r} carries options that this version of millpond cannot read ({error}); "
                "upgrade millpond, or choose another collection name"
            ) from None

    def to_property(self) -> str | None:
        """The options that differ from the default ones, as JSON; ``None`` if none does."""
        default = VectorOptions()
        changed = {
            _STORED_NAMES.get(field.name, field.name): value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != getattr(default, field.name)
        }
        return json.dumps(changed) if changed else None

    def check_lite(self) -> None:
        """Raise InvalidRequestError for what only a server has."""
        for name in ("datatype", "index_quantization", "index_type"):
            if (value := getattr(self, name)) not in (None, "float32", "FLAT"):
                raise InvalidRequestError(
                    f"{name}={value!r}: Milvus Lite stores float32 and searches it exactly; leave it out, or pass the "
                    "URL of a server"
                )

    def needs(self) -> Iterator[Need]:
        """What these options ask of a server."""
        kind = _INDEXES[self._family][self.index_quantization]
        if self.datatype != "float32":
            feature = INT8_VECTORS if self.datatype == "int8" else HALF_VECTORS
            yield Need(feature=feature, option=f"datatype={self.datatype!r}")
        if kind in ("HNSW_SQ", "HNSW_PQ", "IVF_RABITQ"):
            feature = RABITQ if kind == "IVF_RABITQ" else QUANTIZED_HNSW
            yield Need(feature=feature, option=f"index_quantization={self.index_quantization!r}")
        if self.lexical:
            yield Need(feature=BM25, option="hybrid='bm25'")

    def check_write(self, stored: VectorOptions, *, collection: str) -> None:
        """Raise InvalidRequestError unless a collection was created with the same options."""
        for field in dataclasses.fields(self):
            name, own, theirs = field.name, getattr(self, field.name), getattr(stored, field.name)
            if name == "lexical":
                name, own, theirs = "hybrid", own and "bm25", theirs and "bm25"
            if own != theirs:
                raise InvalidRequestError(
                    f"collection {collection!r} was made with {name}={theirs!r}, and this sink has {name}={own!r}; "
                    f"pass {name}={theirs!r}, or another collection name"
                )

    @property
    def field_type(self) -> DataType:
        """The type of the vector fields."""
        return _TYPES[self.datatype]

    def index(self, width: int, *, lite: bool) -> dict[str, Any]:
        """What ``add_index`` takes for the vectors of a width."""
        # Lite's AUTOINDEX is a graph that may lose candidates under a filter. Its collections are small: exact is fine.
        kind = "FLAT" if lite else _INDEXES[self._family][self.index_quantization]
        params: dict[str, Any] = {}
        if kind.startswith("HNSW"):
            params = {"M": 16, "efConstruction": 200}
        elif kind.startswith("IVF"):
            params = {"nlist": 1024}
        if kind == "HNSW_SQ":
            params["sq_type"] = "SQ8"
        if self.index_quantization == "product":
            params |= {"m": _subspaces(width), "nbits": 8}
        if kind in ("HNSW_PQ", "IVF_RABITQ"):  # candidates are compared again by vectors of less loss
            params |= {"refine": True, "refine_type": "FP16"}
        return {"index_type": kind, "metric_type": "COSINE", **({"params": params} if params else {})}

    def search_params(self, limit: int, *, lite: bool) -> dict[str, Any]:
        """What ``search`` takes as parameters of the index."""
        kind = "FLAT" if lite else _INDEXES[self._family][self.index_quantization]
        params: dict[str, Any] = {}
        if kind.startswith("HNSW"):
            params["ef"] = max(128, limit)
        elif kind.startswith("IVF"):
            params["nprobe"] = 64
        if kind in ("HNSW_PQ", "IVF_RABITQ"):
            params["refine_k"] = 4
        return {"metric_type": "COSINE", **({"params": params} if params else {})}

    def encode(self, rows: FloatArray) -> Sequence[Any]:
        """Rows ``[n, width]`` of length 1 as the client takes them, one object for each.

        int8 rows have a scale each, the largest number of the row on 127: the cosine does not depend on it, so it is
        not stored.
        """
        match self.datatype:
            case "float16":
                return list(rows.astype(np.float16))
            case "bfloat16":
                return list(rows.astype(_bfloat16()))
            case "int8":
                largest = np.abs(rows).max(axis=1, keepdims=True)
                scaled = np.divide(rows, largest, out=np.zeros_like(rows), where=largest > 0)
                return list(np.rint(scaled * 127).astype(np.int8))
        return list(rows)

    def encode_query(self, row: FloatArray) -> Any:
        """A question's vector ``[width]``: a server takes the type of the field."""
        return row.tolist() if self.datatype == "float32" else self.encode(row[None])[0]

    def decode(self, value: Any) -> FloatArray:
        """A stored vector as ``[width]`` float32; of int8 with length 1."""
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], bytes):
            value = value[0]
        if not isinstance(value, bytes):
            row = np.asarray(value, dtype=np.float32)
        elif self.datatype == "int8":
            row = np.frombuffer(value, dtype=np.int8).astype(np.float32)
        else:
            kind = np.float16 if self.datatype == "float16" else _bfloat16()
            row = np.frombuffer(value, dtype=kind).astype(np.float32)
        if self.datatype != "int8":
            return row
        length = float(np.linalg.norm(row))
        return row if length == 0 else (row / length).astype(np.float32)

    def partition_of(self, metadata: Mapping[str, Any]) -> str:
        """The value of a record's partition; empty without one."""
        value = metadata.get(self.partition_key or "")
        if value is not None and not isinstance(value, str):
            raise InvalidRequestError(
                f"its metadata has under the partition key {self.partition_key!r} a {type(value).__name__}; make it "
                "a str"
            )
        return value or ""

    @property
    def _family(self) -> str:
        return self.index_type or _FAMILIES[self.index_quantization]


def _subspaces(width: int) -> int:
    """Into how many parts product quantization cuts a vector: of four numbers, or more if the width is no multiple."""
    return next(width // size for size in range(4, width + 1) if width % size == 0) if width >= 4 else 1


def _bfloat16() -> Any:
    try:
        return import_module("ml_dtypes").bfloat16
    except ImportError:
        raise MissingExtraError("datatype='bfloat16' needs ml_dtypes: pip install ml_dtypes") from None
