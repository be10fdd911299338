"""advise: measures, for a source and its queries, what each way to store the vectors keeps of the search."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from millpond.errors import InvalidRequestError
from millpond.ingest.advice.judgements import Judgements, ndcg
from millpond.ingest.advice.layouts import DATATYPES, Layout, layouts
from millpond.ingest.advice.quantized import Datatype, QuantizedVectors, quantize, store
from millpond.ingest.arguments import check_embeds
from millpond.ingest.pages.neighbors import FloatArray, Indices, nearest, plotted_widths, recall
from millpond.ingest.record import Record, Rejected, check_int
from millpond.ingest.sinks.batch import storable
from millpond.ingest.sinks.database import installed
from millpond.ingest.sinks.protocol import check_widths
from millpond.ingest.sources.read import reader_for
from millpond.support.blank import is_blank
from millpond.vectors import matryoshka

if TYPE_CHECKING:
    from millpond.engine.engine import Engine
    from millpond.values.spec import ModelSpec

logger = logging.getLogger(__name__)

Texts = Iterable[Record | Rejected | Mapping[str, Any] | str] | str | os.PathLike[str]

NDCG_K = 10
_MAX_QUERIES = 1000
_FEW_QUERIES = 50


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a layout takes and keeps."""

    layout: Layout
    recall: float  # the share of the `k` nearest by float32 at full width that it finds; the mean of the queries
    ndcg: float | None  # nDCG@10 by the judgements; `None` without them
    stored_bytes: float  # bytes of a row's vectors in all
    scanned_bytes: float  # of these, what a search compares and what belongs in memory
    read_bytes: float  # bytes that an exact search of a million rows reads, for one query, with what it rescores
    seconds: float  # of one query over the sample by numpy: an indication, since databases have an index of their own
    best: bool = False  # no other layout that a database stores is as small, in memory and stored, and as good
    keeps: bool = False  # it keeps the share that was asked for

    @property
    def quality(self) -> float:
        """What decides: the nDCG, or without judgements the recall."""
        return self.recall if self.ndcg is None else self.ndcg


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What was measured, and which layout to take.

    Attributes:
        measurements: Every layout, in the order of width, datatype and quantization.
        rows: Rows that were searched.
        read: Records that the source has.
        queries: Queries that were asked.
        k: Of the recall.
        candidates: Rows that a coarse-to-fine and a rescored search compare at the end.
        keep: The share of the recall, or of the nDCG, to keep.
        notes: What a reader should know: a sample, few queries, judgements of unknown documents.
        smallest: The layout that stores the fewest bytes and keeps the share.
        lightest: The layout that needs the fewest bytes in memory and keeps the share.
    """

    measurements: tuple[Measurement, ...]
    rows: int
    read: int
    queries: int
    k: int
    candidates: int
    keep: float
    notes: tuple[str, ...]
    smallest: Measurement
    lightest: Measurement

    @property
    def judged(self) -> bool:
        """Whether nDCG was measured, which then decides."""
        return self.measurements[0].ndcg is not None

    @property
    def full(self) -> Measurement:
        """The vectors of full width in float32."""
        return _full(self.measurements)


def advise(
    source: Texts,
    *,
    queries: Texts,
    engine: Engine,
    judgements: Judgements | None = None,
    dimensions: Sequence[int] | None = None,
    datatypes: Sequence[Datatype] = DATATYPES,
    database: str | None = None,
    k: int = 10,
    keep: float = 0.99,
    sample: int = 20_000,
    seed: int = 0,
    show_progress: bool = True,
) -> Advice:
    """Measure what each width, datatype, quantization and coarse-to-fine search keeps of the search at full width.

    The records and the queries are embedded once, at full width; every layout is then simulated exactly, without an
    index: what the index of a database misses comes on top. Memory is bounded by ``sample`` vectors of full width and
    a copy; the result does not depend on the machine, but for the times.

    Args:
        source: Records, dicts with ``id`` and ``text``, or texts; or a path that :func:`~millpond.ingest.read` accepts.
            All are read; at most ``sample`` of them, chosen at random, are embedded.
        queries: The same, of the queries; at most 1,000 of them, chosen at random, are asked.
        engine: The engine to embed with, in the roles ``document`` and ``query``. Its cache is used.
        judgements: ``{query id: {document id: grade}}``. With them the nDCG@10 decides, only queries that a document
            answers are asked, and the judged documents are in every sample.
        dimensions: Widths to measure, besides the full one; by default those that the model was trained for, else
            powers of two.
        datatypes: Types of the stored vectors; float32 is measured in any case.
        database: Only layouts that this database, whose package is installed, can store.
        k: Rows to find.
        keep: The share of the full width's recall (or nDCG) that an advised layout keeps.
        sample: Most records to embed.
        seed: Seed of the choices.
        show_progress: Draw a progress bar, if standard error is a terminal or this is a notebook.

    Returns:
        The measurements of every layout, and the advised ones.

    Raises:
        InvalidDimensionsError: The model's vectors cannot have a width.
        InvalidRequestError: An argument is not valid, there is no text or no query, ``k`` is more than the rows, or
            the full width finds nothing that is judged relevant.
        UnsupportedTaskError: The model does not embed.
    """
    _check(k, keep, sample, datatypes, database)
    widths = check_dimensions(engine.spec, dimensions)
    random = np.random.default_rng(seed)
    notes: list[str] = []
    asked = _read_queries(queries, judgements, random, notes)
    judged = {} if judgements is None else {query.id: judgements[query.id] for query in asked}
    records, count = _read_records(
        source, {document for grades in judged.values() for document in grades}, sample, random
    )
    _note_sample(records, count, judged, notes)
    if k > len(records):
        raise InvalidRequestError(f"k={k} is more than the source's {len(records)} records; choose 1 to {len(records)}")
    if len(records) < 10 * k:
        notes.append(f"{len(records)} records: every search finds many of the {k} nearest, whatever the layout.")
    if len(asked) < _FEW_QUERIES:
        notes.append(
            f"{len(asked)} {'query' if len(asked) == 1 else 'queries'}: differences of a few percent are chance."
        )

    simulation = _Simulation(engine, asked, records, judged, k, show_progress=show_progress)
    kinds = [name for name in DATATYPES if name in datatypes or name == "float32"]
    measurements = _marked([*simulation.run(layouts(widths, kinds, database), seed)], keep)
    return Advice(
        measurements=tuple(measurements),
        rows=simulation.rows,
        read=count,
        queries=simulation.queries,
        k=k,
        candidates=simulation.candidates,
        keep=keep,
        notes=tuple(notes),
        smallest=_least(measurements, "stored_bytes", "scanned_bytes"),
        lightest=_least(measurements, "scanned_bytes", "stored_bytes"),
    )


def check_dimensions(spec: ModelSpec, dimensions: Sequence[int] | None) -> list[int]:
    """The widths to measure for a model, ascending; the last one is its full width."""
    check_embeds(spec)
    if dimensions is None:
        chosen = plotted_widths(spec.dimensions, spec.matryoshka_dimensions) if spec.matryoshka else []
        return sorted({width for width in chosen if width >= spec.matryoshka_smallest} | {spec.dimensions})
    return sorted({spec.check_dimensions(width) for width in check_widths(dimensions) or ()} | {spec.dimensions})


def _check(k: int, keep: float, sample: int, datatypes: Sequence[str], database: str | None) -> None:
    check_int("k", k)
    check_int("sample", sample)
    if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 < keep <= 1:
        raise InvalidRequestError(f"keep={keep!r} is not a share; pass a number above 0, up to 1, such as 0.99")
    unknown = [name for name in datatypes if name not in DATATYPES]
    if unknown or not datatypes:
        raise InvalidRequestError(f"datatypes={list(datatypes)!r}; choose among {', '.join(DATATYPES)}")
    if database not in (None, *installed()):
        known = ", ".join(installed()) or "none"
        raise InvalidRequestError(f"database={database!r} is not installed; choose one of {known}, or None")


def _texts(source: Texts, what: str) -> Iterator[Record]:
    """The texts of a source; one that is blank or cannot be read is left out, and the log counts them."""
    if not isinstance(source, str | os.PathLike):
        if not isinstance(source, Iterable):
            raise TypeError(f"{what}: {type(source).__name__} is not iterable; pass records, texts, or a path")
        source = ({"id": str(n), "text": item} if isinstance(item, str) else item for n, item in enumerate(source, 1))
    left_out, first = 0, ""
    for item in reader_for(source):
        if isinstance(item, Record) and not is_blank(item.text):
            yield item
            continue
        left_out += 1
        first = first or (f"{item.id!r} is blank" if isinstance(item, Record) else f"{item.where}: {item.reason}")
    if left_out:
        logger.warning("left out %d of the %s; the first: %s", left_out, what, first)


def _read_queries(
    source: Texts, judgements: Judgements | None, random: np.random.Generator, notes: list[str]
) -> list[Record]:
    queries = list({query.id: query for query in _texts(source, "queries")}.values())
    if not queries:
        raise InvalidRequestError("there is no query; pass at least one text, better fifty, that users really ask")
    if judgements is not None:
        answered = {id for id, grades in judgements.items() if any(grade > 0 for grade in grades.values())}
        known = [query for query in queries if query.id in answered]
        if not known:
            some = next(iter(answered or judgements), "")
            raise InvalidRequestError(
                f"no query is judged: the judgements name queries such as {some!r}, and the queries have ids such as "
                f"{queries[0].id!r}; pass the queries that belong to the judgements"
            )
        if len(known) < len(queries):
            notes.append(
                f"{len(queries) - len(known):,} of {len(queries):,} queries have no relevant document: not asked."
            )
        queries = known
    if len(queries) > _MAX_QUERIES:
        notes.append(f"{_MAX_QUERIES:,} of {len(queries):,} queries are asked, chosen at random.")
        queries = [queries[i] for i in np.sort(random.permutation(len(queries))[:_MAX_QUERIES])]
    return queries


def _read_records(
    source: Texts, judged: set[str], sample: int, random: np.random.Generator
) -> tuple[list[Record], int]:
    """At most ``sample`` of the records, chosen at random, and all that are judged; and how many there are."""
    kept: dict[str, Record] = {}
    reservoir: list[Record] = []
    read = 0
    for record in _texts(source, "records"):
        read += 1
        if record.id in judged:
            kept[record.id] = record
            continue
        # Algorithm R: each of the records so far is in the reservoir with the same chance.
        if len(reservoir) < sample:
            reservoir.append(record)
        elif (slot := int(random.integers(read - len(kept)))) < sample:
            reservoir[slot] = record
    if not read:
        raise InvalidRequestError("the source has no record with a visible character; there is nothing to measure")
    free = max(0, sample - len(kept))
    if len(reservoir) > free:
        reservoir = [reservoir[i] for i in np.sort(random.permutation(len(reservoir))[:free])]
    return list(({record.id: record for record in reservoir} | kept).values()), read


def _note_sample(records: list[Record], read: int, judged: Judgements, notes: list[str]) -> None:
    ids = {record.id for record in records}
    documents = {document for grades in judged.values() for document in grades}
    if judged and not documents & ids:
        raise InvalidRequestError(
            f"no judged document is in the source: the judgements name documents such as {min(documents)!r}, and the "
            f"records have ids such as {records[0].id!r}; name the column of the ids"
        )
    if unknown := len(documents - ids):
        notes.append(
            f"{unknown:,} of {len(documents):,} judged documents are not in the source; no layout can find them, and "
            "the nDCG counts them as missed."
        )
    if len(records) < read:
        notes.append(
            f"{len(records):,} of {read:,} records are searched, chosen at random"
            f"{' (all that are judged are among them)' if judged else ''}: among all of them, neighbours are closer "
            "and the recall is lower."
        )


def _embed(
    engine: Engine, texts: list[Record], role: Literal["query", "document"], show_progress: bool
) -> tuple[FloatArray, list[Record]]:
    """``[n, d]`` float32, normalized, and the texts that they belong to."""
    output = engine.embed(
        [text.text for text in texts],
        role=role,
        dimensions=engine.spec.dimensions,
        normalize=True,
        show_progress=show_progress,
    )
    rows = np.asarray(output.embeddings, np.float32)
    good = storable(rows)
    if not good.all():
        logger.warning("left out %d texts, whose vectors are not finite, or all zero", int((~good).sum()))
    return rows[good], [text for text, keep in zip(texts, good, strict=True) if keep]


class _Simulation:
    """Searches of the same queries among the same rows in every layout."""

    def __init__(
        self,
        engine: Engine,
        asked: list[Record],
        records: list[Record],
        judged: Judgements,
        k: int,
        *,
        show_progress: bool,
    ) -> None:
        self._queries, asked = _embed(engine, asked, "query", show_progress)
        self._rows, records = _embed(engine, records, "document", show_progress)
        self.queries, self.rows = len(asked), len(records)
        if not asked or len(records) < k:
            raise InvalidRequestError("too few vectors are finite and not zero; try dtype='float32'")
        self._ids = [record.id for record in records]
        self._grades = [judged[query.id] for query in asked] if judged else None
        self._k = k
        self._found = min(max(k, NDCG_K if judged else 0), len(records))
        self.candidates = min(max(100, 10 * k), len(records))
        best = nearest(self._queries, self._rows, self._found)
        self._exact = best[:, :k]
        if self._ndcg(best) == 0:
            raise InvalidRequestError(
                f"nDCG@{NDCG_K} is 0: the full width finds no relevant document of any query, so there is nothing to "
                "keep; check that the judgements belong to these texts, or leave them out, and the recall decides"
            )

    def run(self, plan: Iterable[Layout], seed: int) -> Iterable[Measurement]:
        """Measure layouts, in the order of :func:`layouts`."""
        # Consecutive layouts share their codes; at most three copies of the rows are in memory.
        stored = lru_cache(maxsize=2)(lambda width, datatype: store(self._cut(width), datatype))
        quantized = lru_cache(maxsize=1)(lambda width, name: quantize(self._cut(width), name, seed=seed))
        for layout in plan:
            vectors = stored(layout.width, layout.final_datatype)
            if layout.coarse:
                yield self._measure(layout, stored(layout.coarse, layout.datatype), vectors)
            elif layout.quantization:
                yield self._measure(layout, quantized(layout.width, layout.quantization), vectors)
            else:
                yield self._measure(layout, vectors, None)

    def _cut(self, width: int) -> FloatArray:
        return matryoshka.cut(self._rows, width, normalize=True)

    def _measure(self, layout: Layout, searched: QuantizedVectors, vectors: QuantizedVectors | None) -> Measurement:
        """A search of what is ``searched``, and of the stored ``vectors`` behind it, if there are any."""
        rescored = vectors if layout.coarse or layout.rescore else None
        start = time.perf_counter()
        queries = matryoshka.cut(self._queries, layout.coarse or layout.width, normalize=True)
        if rescored is None:
            found = searched.search(queries, self._found)
        else:
            candidates = searched.search(queries, self.candidates)
            queries = matryoshka.cut(self._queries, layout.width, normalize=True)
            found = rescored.rescore(queries, candidates, self._found)
        seconds = (time.perf_counter() - start) / len(self._queries)
        return Measurement(
            layout=layout,
            recall=recall(found[:, : self._k], self._exact),
            ndcg=self._ndcg(found),
            stored_bytes=searched.bytes + (0 if vectors is None else vectors.bytes),
            scanned_bytes=searched.bytes,
            read_bytes=searched.bytes * 1_000_000 + (0 if rescored is None else rescored.bytes * self.candidates),
            seconds=seconds,
        )

    def _ndcg(self, found: Indices) -> float | None:
        if self._grades is None:
            return None
        rankings = ([self._ids[index] for index in row] for row in found.tolist())
        return float(np.mean([ndcg(row, grades, NDCG_K) for row, grades in zip(rankings, self._grades, strict=True)]))


def _full(measurements: Sequence[Measurement]) -> Measurement:
    widest = max(one.layout.width for one in measurements)
    return next(one for one in measurements if one.layout == Layout(width=widest))


def _marked(measurements: list[Measurement], keep: float) -> list[Measurement]:
    """The measurements with ``best`` and ``keeps``."""
    least = keep * _full(measurements).quality
    possible = np.array([one.layout.storable for one in measurements])
    sizes = np.array([(one.stored_bytes, one.scanned_bytes) for one in measurements])  # [layouts, 2]
    qualities = np.array([one.quality for one in measurements])
    marked = []
    for i, one in enumerate(measurements):
        as_good = possible & (sizes <= sizes[i]).all(axis=1) & (qualities >= qualities[i])
        better = (sizes < sizes[i]).any(axis=1) | (qualities > qualities[i])
        best = bool(possible[i]) and not (as_good & better).any()
        marked.append(replace(one, best=best, keeps=bool(qualities[i] >= least - 1e-9)))
    return marked


def _least(measurements: Sequence[Measurement], first: str, second: str) -> Measurement:
    """The smallest layout that a database stores and that keeps the share; of equal ones the better one."""
    return min(
        (one for one in measurements if one.keeps and one.layout.storable),
        key=lambda one: (getattr(one, first), getattr(one, second), -one.quality),
    )
