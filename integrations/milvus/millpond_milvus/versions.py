"""Feature: what a Milvus server has from some version on, and what to pass to an older one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from millpond.errors import InvalidRequestError


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Something that sinks and indexes ask of a server."""

    name: str
    since: tuple[int, ...]  # the version
    instead: str  # what to do with an older server


UPSERTS = Feature(name="upserts and the metric COSINE", since=(2, 3), instead="use another server")
SEVERAL_VECTORS = Feature(
    name="a collection with several vector fields", since=(2, 4), instead="store one width, as dimensions=[{width}]"
)
SPARSE_VECTORS = Feature(name="sparse vectors", since=(2, 4), instead="leave hybrid out")
BM25 = Feature(name="BM25 functions", since=(2, 5), instead="leave hybrid out")
HALF_VECTORS = Feature(name="vectors of 16 bits", since=(2, 4), instead="leave datatype out")
INT8_VECTORS = Feature(name="int8 vectors", since=(2, 6), instead="leave datatype out")
QUANTIZED_HNSW = Feature(name="quantized HNSW", since=(2, 5), instead="pass index_type='IVF' with it")
RABITQ = Feature(name="IVF_RABITQ", since=(2, 6), instead="leave index_quantization out")
TOKEN_VECTORS = Feature(
    name="arrays of structs with vectors", since=(2, 6, 4), instead="pass a *.db file (Milvus Lite)"
)


@dataclass(frozen=True, kw_only=True)
class Need:
    """A feature, and what asks for it, as it is written in Python."""

    feature: Feature
    option: str
    width: int = 0  # the largest


def check_version(version: str, needs: Iterable[Need], *, server: str) -> None:
    """Raise InvalidRequestError for the first feature that a server of this version lacks.

    A version without numbers, as of a build of the development branch, has them all; ``2.6`` is any 2.6.
    """
    numbers = re.search(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if numbers is None:
        return
    has = tuple(int(part) for part in numbers.groups() if part is not None)
    for need in needs:
        since = need.feature.since
        if has < since[: len(has)]:
            raise InvalidRequestError(
                f"{server} has version {numbers[0]}, and {need.option} needs {'.'.join(map(str, since))} "
                f"({need.feature.name}); {need.feature.instead.format(width=need.width)}, or upgrade the server"
            )
