"""Layout: a way to store the vectors of a collection and to search them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from millpond.ingest.advice.codes import Datatype, Quantization

DATATYPES: tuple[Datatype, ...] = get_args(Datatype)
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
# Qdrant has the quantized copies; of vectors that take a byte or less they save nothing worth their loss.
_QUANTIZED = ("float32", "float16")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Vectors of one width, maybe with a smaller copy that is searched first.

    Attributes:
        width: Width of the vectors that give the final order.
        datatype: Their type; ``bit`` of a funnel is that of the narrow vectors, before float32.
        quantization: Of the copy that the database keeps in memory and searches; ``None``: there is none.
        rescore: Whether the best by the copy are then sorted by the vectors themselves.
        coarse: Width of the vectors that find the candidates (a funnel); ``None``: there are none.
    """

    width: int
    datatype: Datatype = "float32"
    quantization: Quantization | None = None
    rescore: bool = False
    coarse: int | None = None

    @property
    def name(self) -> str:
        """The layout in words: ``128 -> 384 float16``, ``384 float32 + binary, rescored``."""
        if self.coarse and self.datatype == "bit":
            return f"{self.coarse} bit -> {self.width} float32"
        copy = f" + {self.quantization}{', rescored' if self.rescore else ''}" if self.quantization else ""
        return f"{self.widths} {self.datatype}{copy}"

    @property
    def widths(self) -> str:
        """The widths in words: ``384``, ``128 -> 384``."""
        return f"{self.coarse} -> {self.width}" if self.coarse else str(self.width)

    @property
    def final_datatype(self) -> Datatype:
        """The type of the vectors that give the final order."""
        return "float32" if self.coarse and self.datatype == "bit" else self.datatype

    @property
    def kind(self) -> str:
        """What finds the rows: ``vectors``, a quantization, or ``funnel``."""
        return "funnel" if self.coarse else self.quantization or "vectors"

    @property
    def databases(self) -> tuple[str, ...]:
        """The databases that can store it, by the first part of their URL; bits alone are stored by none."""
        if self.quantization:
            return ("qdrant",)
        if self.datatype == "bit":
            return ("pgvector",) if self.coarse else ()
        return _DATABASES[self.datatype]

    def options(self) -> list[str]:
        """The options of ``millpond ingest`` that make it."""
        widths = ",".join(map(str, [self.coarse, self.width] if self.coarse else [self.width]))
        options = ["--dimensions", widths]
        if self.datatype != "float32":
            options += ["--sink", f"datatype={self.datatype}"]
        if self.quantization:
            options += ["--sink", f"quantization={self.quantization}"]
        return options

    def command(self, source: str, model: str, *, database: str | None = None, options: Sequence[str] = ()) -> str:
        """The command line that ingests a source in this layout, into a database on this machine.

        Args:
            source: The source.
            model: The model.
            database: One of :data:`DATABASES`; ``None``: the first that can store the layout.
            options: Further options.

        Raises:
            IndexError: No database can store the layout.
        """
        url = _URLS[database or self.databases[0]]
        return shlex.join(["millpond", "ingest", source, "--model", model, "--to", url, *self.options(), *options])


_URLS = {
    "qdrant": "qdrant+http://localhost:6333#docs",
    "milvus": "milvus+http://localhost:19530#docs",
    "lancedb": "lancedb+path:vectors#docs",
    "pgvector": "pgvector+postgresql://localhost/db#docs",
}
DATABASES = tuple(_URLS)
_DATABASES: dict[str, tuple[str, ...]] = {
    "float32": ("qdrant", "milvus", "lancedb", "pgvector"),
    "float16": ("qdrant", "milvus", "lancedb", "pgvector"),
    "bfloat16": ("milvus",),
    "int8": ("milvus",),
    "uint8": ("qdrant",),
}


def layouts(
    widths: Sequence[int], datatypes: Sequence[Datatype] = DATATYPES, database: str | None = None
) -> Iterator[Layout]:
    """Every layout of these widths: alone in each type, with each quantized copy, and each funnel to the last width.

    Args:
        widths: Ascending; the last one is the full width.
        datatypes: The types of the stored vectors.
        database: Only layouts that this database can store.
    """
    return (one for one in _layouts(widths, datatypes) if database is None or database in one.databases)


def _layouts(widths: Sequence[int], datatypes: Sequence[Datatype]) -> Iterator[Layout]:
    quantized = [datatype for datatype in datatypes if datatype in _QUANTIZED]
    for width in widths:
        for datatype in datatypes:
            yield Layout(width=width, datatype=datatype)
        for quantization in QUANTIZATIONS:
            for datatype in quantized:
                for rescore in (False, True):
                    yield Layout(width=width, datatype=datatype, quantization=quantization, rescore=rescore)
    for datatype in datatypes:
        for coarse in widths[:-1]:
            yield Layout(width=widths[-1], datatype=datatype, coarse=coarse)
