"""AuditReport: what an audit found, as JSON and as lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from millpond.audit.faults import FAULTS, Finding
from millpond.audit.forms import Form
from millpond.audit.identify import Identification
from millpond.audit.sequential import ShareBounds
from millpond.ingest.sinks.raw_rows import VectorField

_SHOWN_IDS = 3


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """What an audit found.

    Attributes:
        collection: The name of the collection.
        vectors: The vectors that were looked at.
        text: The field of the texts.
        form: The form of the vectors.
        dimensions: The width of the model's own vectors; 0 if no model was found.
        found: The setting that made most of them.
        length: Words for the length of the vectors.
        bounds: How many rows are off, of those that were drawn at random.
        recomputed: How many rows were compared with the model.
        left: How many strange rows were not, since there are too many.
        findings: The rows that are off.
        models: The models that were tried.
        fixed: How many rows were embedded again.
        unfixed: Why rows were not, by their ids.
    """

    collection: str
    vectors: VectorField
    text: str
    form: Form
    dimensions: int
    found: Identification
    length: str
    bounds: ShareBounds
    recomputed: int
    left: int
    findings: tuple[Finding, ...]
    models: tuple[str, ...]
    fixed: int = 0
    unfixed: tuple[tuple[str, str], ...] = ()

    @property
    def clean(self) -> bool:
        """Whether a setting was found, and every row that was looked at is by it or was fixed."""
        if self.bounds.total == 0:
            return True
        return self.found.setting is not None and len(self.findings) == self.fixed

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON."""
        setting, bounds = self.found.setting, self.bounds
        return {
            "collection": self.collection,
            "clean": self.clean,
            "rows": bounds.total,
            "vectors": {
                "name": self.vectors.name,
                "width": self.vectors.width,
                "distance": self.vectors.distance,
                "stored_as": self.vectors.datatype,
            },
            "text": self.text,
            "setting": None
            if setting is None
            else {
                **setting.to_json(),
                "dimensions": self.form.used,
                "of": self.dimensions,
                "datatype": self.found.level,
                "length": self.length,
            },
            "not_told_apart": [each.to_json() for each in self.found.same],
            "nearest": None if self.found.nearest is None else self.found.nearest.to_json(),
            "distance": None if self.found.distance != self.found.distance else self.found.distance,
            "tolerance": self.found.tolerance,
            "tried": self.found.tried,
            "models": list(self.models),
            "confidence": bounds.confidence,
            "sampled": bounds.rows,
            "off_in_sample": bounds.off,
            "off_share": [bounds.low, bounds.high],
            "recomputed": self.recomputed,
            "strange_and_not_recomputed": self.left,
            "off": dict(Counter(each.fault for each in self.findings)),
            "findings": [
                {"id": each.id, "fault": each.fault, "detail": each.detail, "distance": each.distance}
                for each in self.findings
            ],
            "fixed": self.fixed,
            "unfixed": dict(self.unfixed),
        }

    def facts(self) -> Iterator[tuple[str, str]]:
        """The answer as names and values, for a table."""
        bounds, setting = self.bounds, self.found.setting
        name = f"{self.vectors.name} " if self.vectors.name else ""
        about = ", ".join(word for word in (self.vectors.datatype, self.vectors.distance) if word)
        yield "vectors", f"{name}{self.vectors.width}" + (f" ({about})" if about else "")
        yield "rows", str(bounds.total)
        if bounds.total == 0:
            return
        yield "text", self.text
        if setting is None:
            yield "made by", f"none of the {self.found.tried} settings of {', '.join(self.models)}"
            if self.found.nearest is not None:
                near = self.found.nearest
                yield "nearest", f"{near.model}, {near.pooling}, {near.prompt_name}; cosine {self.cosine:.4f}"
            return
        yield "made by", setting.model
        yield "pooling", setting.pooling or "of static vectors"
        yield "prompt", f"{setting.prompt!r} ({setting.prompt_name})" if setting.prompt else "none"
        yield "max length", f"{setting.max_length} tokens{self._longer()}"
        yield "embedded", setting.text
        yield "width", self.form.words(self.dimensions)
        yield "datatype", self.found.level + (f", {self.length}" if self.length else "")
        yield "cosine", f"{self.cosine:.9f} (median), at least {1 - self.found.tolerance**2 / 2:.9f} fits"
        yield "by it", self.share

    @property
    def cosine(self) -> float:
        """The median cosine with the nearest setting."""
        return 1 - self.found.distance**2 / 2

    @property
    def share(self) -> str:
        """How many rows are by the setting, and how sure that is."""
        bounds = self.bounds
        if bounds.rows >= bounds.total:
            return f"{bounds.total - bounds.off} of {bounds.total} rows; every row was looked at"
        return (
            f"{100 * (1 - bounds.high):.2f} to {100 * (1 - bounds.low):.2f} % of the rows, with a confidence of "
            f"{100 * bounds.confidence:g} %; {bounds.rows} drawn at random were recomputed"
        )

    def faults(self) -> Iterator[tuple[str, str, str, str]]:
        """For each fault: how many rows, its name, what it means, and some ids."""
        for fault, count in Counter(each.fault for each in self.findings).most_common():
            rows = [each for each in self.findings if each.fault == fault]
            details = Counter(each.detail for each in rows if each.detail).most_common(1)
            words = FAULTS[fault] + (f": {'; '.join(detail for detail, _ in details)}" if details else "")
            ids = ", ".join(each.id for each in rows[:_SHOWN_IDS]) + (", ..." if count > _SHOWN_IDS else "")
            yield str(count), fault, words, ids

    def _longer(self) -> str:
        """Which other lengths these texts do not tell from it."""
        lengths = (
            sorted({each.max_length for each in self.found.same if each.max_length != self.found.setting.max_length})
            if self.found.setting
            else []
        )
        return f" (or {', '.join(map(str, lengths))}: no text shows it)" if lengths else ""
