"""Layout: a way to store the vectors of a collection and to search them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import get_args

from millpond.ingest.advice.quantized import Datatype, Quantization
from millpond.ingest.sinks.database import Database, installed

DATATYPES: tuple[Datatype, ...] = get_args(Datatype)
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
# Of vectors that take a byte or less the quantized copies save nothing worth their loss.
_QUANTIZED = ("float32", "float16")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Vectors of one width, maybe with a smaller copy that is searched first."""

    width: int  # width of the vectors that give the final order
    datatype: Datatype = "float32"  # `bit` of a coarse-to-fine search is that of the narrow vectors, before float32
    quantization: Quantization | None = None  # of the copy that is searched in memory
    rescore: bool = False  # whether the best by the copy are then sorted by the vectors themselves
    coarse: int | None = None  # width of the vectors that find the candidates (coarse to fine); `None`: there are none

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
        """What finds the rows: ``vectors``, a quantization, or ``coarse_to_fine``."""
        return "coarse_to_fine" if self.coarse else self.quantization or "vectors"

    @property
    def databases(self) -> tuple[str, ...]:
        """The installed databases that can store it, by the first part of their URL; bits alone are stored by none."""

        def stores(one: Database) -> bool:
            if self.quantization and self.quantization not in one.quantizations:
                return False
            return self.datatype in one.datatypes or (bool(self.coarse) and self.datatype in one.coarse_datatypes)

        return tuple(name for name, one in installed().items() if stores(one))

    @property
    def storable(self) -> bool:
        """Whether a database can store it; without an installed one, all but bits alone."""
        return bool(self.databases) or (not installed() and (self.datatype != "bit" or bool(self.coarse)))

    def command(self, source: str, model: str, *, database: str | None = None, options: Sequence[str] = ()) -> str:
        """The command line that ingests a source in this layout, into a database on this machine."""
        name = database or next(iter(self.databases), None)
        url = "URL" if name is None else installed()[name].urls[0]
        widths = f"{self.coarse},{self.width}" if self.coarse else str(self.width)
        words = ["millpond", "ingest", source, "--model", model, "--to", url, "--dimensions", widths]
        if self.datatype != "float32":
            words += ["--sink", f"datatype={self.datatype}"]
        if self.quantization:
            words += ["--sink", f"index_quantization={self.quantization}"]
        return shlex.join([*words, *options])


def layouts(
    widths: Sequence[int], datatypes: Sequence[Datatype] = DATATYPES, database: str | None = None
) -> list[Layout]:
    """Every layout of these widths: alone in each type, with each quantized copy, and coarse to fine."""
    copies = list(product(QUANTIZATIONS, [datatype for datatype in datatypes if datatype in _QUANTIZED], (False, True)))
    every = []
    for width in widths:
        every += [Layout(width=width, datatype=datatype) for datatype in datatypes]
        every += [Layout(width=width, datatype=kind, quantization=name, rescore=again) for name, kind, again in copies]
    every += [
        Layout(width=widths[-1], datatype=kind, coarse=coarse) for kind, coarse in product(datatypes, widths[:-1])
    ]
    return [one for one in every if database is None or database in one.databases]
