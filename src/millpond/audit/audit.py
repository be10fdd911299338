"""audit: which model and settings made the vectors of a collection, and which rows are not by it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from millpond.audit.candidates import Models
from millpond.audit.faults import Diagnosis, Finding, length_faults
from millpond.audit.forms import EQUAL, PRECISIONS, Form
from millpond.audit.identify import Identification, identify
from millpond.audit.report import AuditReport
from millpond.audit.rows import Row, batches, document_of
from millpond.audit.scan import Bools, Scan, chosen_rows, every_row, modal_zeros, read_rows, scan
from millpond.audit.sequential import ShareBounds
from millpond.errors import InvalidRequestError
from millpond.ingest.sinks.batch import FloatArray
from millpond.ingest.sinks.collection import CollectionSink
from millpond.ingest.sinks.manifest import CollectionManifest
from millpond.ingest.sinks.raw_rows import RawPage, RawRows, VectorField

_MARGIN = 0.005  # of the share of rows that are off: once it is known so well, no more rows are drawn
_BATCH = 64  # rows that are recomputed at a time, between two looks at the bounds
_FORM_ROWS = 512
_STRANGE = 2048  # rows that the tests of every row find strange, most that are recomputed
_DIAGNOSED = 256  # rows at a time
_PARTNERS = 256  # rows that are off, most whose vectors are looked for in every row


@dataclass(frozen=True, kw_only=True)
class AuditOptions:
    """How much an audit looks at.

    Attributes:
        vector: The name of the vectors; ``None`` for the widest.
        text: The field of the texts; ``None`` for a guess.
        sample: Most rows that are drawn at random and recomputed.
        confidence: Of the bounds of the share of rows that are off.
        every: Recompute every row.
        advance: Called with the number of rows that were read.

    Raises:
        InvalidRequestError: A number out of its range.
    """

    vector: str | None = None
    text: str | None = None
    sample: int = 2000
    confidence: float = 0.99
    every: bool = False
    advance: Callable[[int], object] = field(default=lambda rows: None, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.sample, bool) or not isinstance(self.sample, int) or self.sample < 1:
            raise InvalidRequestError(f"sample={self.sample!r} must be an int from 1")
        if not isinstance(self.confidence, float) or not 0.5 <= self.confidence < 1:
            raise InvalidRequestError(f"confidence={self.confidence!r} must be a number from 0.5 to below 1, as 0.99")


def audit(sink: CollectionSink[Any], models: Models, options: AuditOptions | None = None) -> AuditReport:
    """Look at a collection, whoever made it; nothing is written.

    Args:
        sink: A sink of the collection.
        models: The models that may have made its vectors.
        options: How much is looked at.

    Returns:
        What was found.

    Raises:
        InvalidRequestError: There is no such collection or field, or the collection has no dense vectors, no texts, or
            late chunks.
        SinkError: The database does not answer, or its sink cannot read what others wrote.
    """
    options = AuditOptions() if options is None else options
    raw = sink.raw()
    manifest = sink.describe().manifest
    if isinstance(manifest, CollectionManifest) and manifest.context is not None:
        raise InvalidRequestError(
            f"collection {sink.collection!r} holds late chunks, whose vectors are of whole documents and not of the "
            "texts that are stored; compare it with its source by millpond ingest --verify"
        )
    vectors = _field(raw, options.vector, sink.collection)
    known = scan(
        raw,
        vectors,
        text=options.text,
        hashed=isinstance(manifest, CollectionManifest),
        sample=max(options.sample, _FORM_ROWS),
        advance=options.advance,
    )
    if len(known) and known.text is None:
        raise InvalidRequestError(f"no field of collection {sink.collection!r} looks like texts; name it with text=")
    usable = [row for row in known.sample if known.vectors[row.index]]
    form = Form.of(_stacked(usable[:_FORM_ROWS], vectors.width))
    found = identify(models, form, [row for row in usable if row.text])
    findings = {each.id: each for each in _without_model(known)}
    bounds = ShareBounds(off=0, rows=0, total=len(known), confidence=options.confidence)
    length, recomputed, left = "", 0, 0
    if found.setting is not None:
        comparison = _Comparison(raw, vectors, known, models, form, found, findings)
        bounds = comparison.draw(options.sample, bounds)
        left = comparison.compare_strange()
        if options.every:
            bounds, left = comparison.compare_all(bounds), 0
        comparison.name()
        length, recomputed = comparison.length, len(comparison.recomputed)
    order = {row_id: index for index, row_id in enumerate(known.ids)} if findings else {}
    return AuditReport(
        collection=sink.collection,
        vectors=vectors,
        text="" if known.text is None else known.text.words,
        form=form,
        dimensions=0 if found.setting is None else models.specs[found.setting.model].dimensions,
        found=found,
        length=length,
        bounds=bounds,
        recomputed=recomputed,
        left=left,
        findings=tuple(sorted(findings.values(), key=lambda finding: order[finding.id])),
        models=tuple(models.names),
    )


def _without_model(known: Scan) -> Iterator[Finding]:
    """What is wrong with rows whatever made them; of several faults of a row, the last one counts."""
    for fault, rows in (
        ("stale hash", known.stale),
        ("zero", known.present & known.finite & (known.norms == 0)),
        ("not finite", known.present & ~known.finite),
        ("missing", ~known.present),
    ):
        for index in np.flatnonzero(rows).tolist():
            yield Finding(id=known.ids[index], fault=fault)


class _Comparison:
    """Compares rows with the setting, and adds those that are off to the findings."""

    def __init__(
        self,
        raw: RawRows,
        vectors: VectorField,
        known: Scan,
        models: Models,
        form: Form,
        found: Identification,
        findings: dict[str, Finding],
    ) -> None:
        assert found.setting is not None
        self._raw, self._vectors, self._known = raw, vectors, known
        self._models, self._form, self._found, self._setting = models, form, found, found.setting
        self._findings = findings
        self._off: dict[int, tuple[Row, float]] = {}  # rows to be named, with their distances
        self.recomputed: set[int] = set()
        self.length = ""  # words for the length of most vectors

    def draw(self, most: int, bounds: ShareBounds) -> ShareBounds:
        """Compare rows of the sample until enough is known."""
        known = self._known
        drawn = known.sample[:most]
        for rows in batches(drawn, _BATCH):
            self.compare([row for row in rows if known.vectors[row.index]])
            off = sum(row.id in self._findings or row.index in self._off for row in rows)
            bounds = ShareBounds(
                off=bounds.off + off, rows=bounds.rows + len(rows), total=bounds.total, confidence=bounds.confidence
            )
            if bounds.is_known_to(_MARGIN) and bounds.rows < bounds.total and len(known) > len(drawn):
                break
        return bounds

    def compare(self, rows: Sequence[Row]) -> None:
        """Recompute rows, and note which are not by the setting."""
        rows = [row for row in rows if row.index not in self.recomputed and row.id not in self._findings]
        if not rows:
            return
        self.recomputed.update(row.index for row in rows)
        expected = self._models.vectors(self._setting, rows)
        assert expected is not None
        distances = self._form.distances(_stacked(rows, self._vectors.width), expected)
        fits = distances <= self._found.tolerance
        fitting = [row for row, is_fit in zip(rows, fits, strict=True) if is_fit]
        length, faults = length_faults(fitting, self._form, expected[fits], usual=self.length)
        self.length = self.length or length
        self._findings |= {each.id: each for each in faults.values()}
        for row, distance, is_fit in zip(rows, distances, fits, strict=True):
            if not is_fit:
                self._off[row.index] = (row, 2.0 if np.isnan(distance) else float(distance))

    def compare_strange(self) -> int:
        """Compare rows that differ from most in a way that needs no model to see; returns how many were too many."""
        known, form = self._known, self._form
        usual = np.bincount(known.precision[known.vectors], minlength=len(PRECISIONS)).argmax()
        strange = known.blank | (known.zeros > modal_zeros(known, form)) | (known.precision > usual)
        if form.kind == "float":
            strange |= np.abs(known.norms - 1) > 1e-2 if form.unit else np.abs(known.norms - 1) < 1e-4
        places = np.flatnonzero(strange & known.vectors).tolist()
        places += [index for index in known.duplicates() if not strange[index]]
        wanted = [known.ids[index] for index in places if index not in self.recomputed]
        self.compare(read_rows(self._raw, self._vectors, wanted[:_STRANGE], known.text))
        return max(0, len(wanted) - _STRANGE)

    def compare_all(self, bounds: ShareBounds) -> ShareBounds:
        """Compare every row."""
        known = self._known
        for rows in batches(every_row(self._raw, self._vectors, known.text), _BATCH):
            self.compare([row for row in rows if known.vectors[row.index]])
            self._models.forget()
        off = len(self._findings) + len(self._off)
        return ShareBounds(off=off, rows=len(known), total=len(known), confidence=bounds.confidence)

    def name(self) -> None:
        """Name what is wrong with the rows that are not by the setting."""
        known = self._known
        groups = known.duplicates()
        duplicated = {index: groups[index] for index in self._off if index in groups}
        off = [row for row, _ in self._off.values()]
        documents, partners = self._around(off, duplicated)
        others = [*off, *partners]
        ids = {index: _other_of(index, group, self._off, known) for index, group in duplicated.items()}
        diagnosis = Diagnosis(self._models, self._form, self._found)
        for part in batches(self._off.values(), _DIAGNOSED):
            rows = [row for row, _ in part]
            distances = np.array([distance for _, distance in part], dtype=np.float32)
            for finding in diagnosis.name(rows, distances, documents=documents, others=others, duplicated=ids):
                self._findings[finding.id] = finding

    def _around(
        self, off: Sequence[Row], duplicated: Mapping[int, Sequence[int]]
    ) -> tuple[dict[str, list[Row]], list[Row]]:
        """The documents of rows that are off, and rows whose vectors they may have, in one pass over all."""
        if not off:
            return {}, []
        known, expected = self._known, self._models.vectors(self._setting, list(off)[:_PARTNERS])
        names = {row.document for row in off if row.document is not None and row.start is not None}
        copies = {index for group in duplicated.values() for index in list(group)[:_BATCH]}
        limit = max(self._found.tolerance, EQUAL)

        def choose(page: RawPage, first: int) -> Bools:
            places = range(first, first + len(page))
            chosen = np.fromiter((place in copies for place in places), dtype=np.bool_, count=len(page))
            if expected is not None:  # rows that have the vector of a text which is off
                chosen |= self._form.table(page.vectors, expected).min(axis=1) <= limit
            if names:
                chosen |= np.array([document_of(fields) in names for fields in page.fields])
            return chosen

        documents: dict[str, list[Row]] = {}
        partners: list[Row] = []
        for row in chosen_rows(self._raw, self._vectors, known.text, choose):
            if row.document in names:
                documents.setdefault(str(row.document), []).append(row)
            if row.index not in self._off and known.vectors[row.index] and len(partners) < _STRANGE:
                partners.append(row)
        return documents, partners


def _field(raw: RawRows, name: str | None, collection: str) -> VectorField:
    fields = raw.fields()
    if not fields:
        raise InvalidRequestError(f"collection {collection!r} has no dense vectors to look at")
    if name is None:
        return fields[0]
    for field_ in fields:
        if field_.name == name:
            return field_
    known = ", ".join(each.name or "''" for each in fields)
    raise InvalidRequestError(f"vector={name!r} is no vector of collection {collection!r}; it has {known}")


def _other_of(index: int, group: Sequence[int], off: Mapping[int, Any], known: Scan) -> str:
    """Which row a vector was copied from: one that is right, if there is one."""
    others = [other for other in group if other != index and known.text_hash[other] != known.text_hash[index]]
    return known.ids[min(others, key=lambda other: (other in off, other))] if others else known.ids[group[0]]


def _stacked(rows: Iterable[Row], width: int) -> FloatArray:
    return np.array([row.vector for row in rows], dtype=np.float32).reshape(-1, width)
