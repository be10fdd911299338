"""Finding: a row that is off, and the name of what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from millpond.audit.candidates import Models, Setting
from millpond.audit.documents import passages
from millpond.audit.forms import EQUAL, PRECISIONS, Form, precisions, trailing_zeros
from millpond.audit.identify import Identification, identify, precision_of
from millpond.audit.rows import Row
from millpond.ingest.sinks.batch import FloatArray

FAULTS: Mapping[str, str] = {
    "missing": "has no vector",
    "not finite": "has NaN or infinity in its vector",
    "zero": "has a vector of zeros",
    "no text": "has a vector and no text",
    "stale hash": "has another text than the one that millpond wrote",
    "stale": "has the vector of a text that is not here, or of a model that was not named",
    "swapped": "has the vector of another row's text",
    "duplicate": "has the vector of a row with another text",
    "model": "is by another model",
    "pooling": "is by another pooling",
    "prompt": "is by another prompt",
    "truncation": "is of a text that was cut elsewhere",
    "text": "is of another form of the text",
    "chunk": "is of another part of the document",
    "padded": "is a shorter vector, padded with zeros",
    "precision": "was rounded to fewer digits than the others",
    "length": "has another length than the others",
}
"""What may be wrong with a row, by its name."""

_NORMS = 0.01  # relative
_LEAST_WIDTH = 8  # of a shorter vector: a few numbers agree by chance
_SIMULATED = 0.25  # of its distance, if a vector is rounded as the stored one was
_ALIKE = 4  # rows that nothing explains, for which a setting is searched that differs in several things
_BETTER = 0.25  # of the distance from the collection's setting, from the one that made a row


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A row that is off.

    Attributes:
        id: The row's id.
        fault: A name of :data:`FAULTS`.
        detail: What was found in its place.
        distance: From the setting's vector, as unit vectors; ``None`` if it was not computed.
    """

    id: str
    fault: str
    detail: str = ""
    distance: float | None = None


class Diagnosis:
    """Names what is wrong with rows that are not by the collection's setting."""

    def __init__(self, models: Models, form: Form, found: Identification) -> None:
        assert found.setting is not None
        self._models, self._form, self._found, self._setting = models, form, found, found.setting
        self._dimensions = models.specs[found.setting.model].dimensions

    def name(
        self,
        rows: Sequence[Row],
        distances: FloatArray,
        *,
        documents: Mapping[str, Sequence[Row]],
        others: Sequence[Row],
        duplicated: Mapping[int, str],
    ) -> list[Finding]:
        """A finding for each row.

        Args:
            rows: Rows that are off.
            distances: ``[n]``, from the setting.
            documents: The rows of their documents, by what tells documents from others.
            others: Rows whose vectors may have been mistaken for these.
            duplicated: For rows whose vector another row has, by their index, the id of that row.

        Returns:
            ``n`` findings.
        """
        named: dict[int, Finding] = {}
        self._by_settings(rows, distances, self._settings(rows), named)
        self._by_numbers(rows, distances, named)
        self._by_row(rows, distances, others, named, duplicated)
        self._by_part(rows, distances, documents, named)
        left = [index for index, row in enumerate(rows) if index not in named and row.text]
        if (
            len(left) >= _ALIKE
            and (second := identify(self._models, self._form, [rows[index] for index in left])).setting
        ):
            found: dict[int, Finding] = {}
            self._by_settings([rows[index] for index in left], distances[left], [second.setting], found)
            named |= {left[place]: finding for place, finding in found.items()}
        findings = []
        for index, row in enumerate(rows):
            if index not in named:
                fault, detail = ("no text", "") if not row.text else ("stale", "")
                if row.index in duplicated:
                    fault, detail = "duplicate", f"of {duplicated[row.index]}"
                named[index] = _finding(row, fault, detail, distances[index])
            findings.append(named[index])
        return findings

    def _by_settings(
        self, rows: Sequence[Row], distances: FloatArray, settings: Iterable[Setting], named: dict[int, Finding]
    ) -> None:
        """Rows that another setting made."""
        stored = _stacked(rows)
        best = distances * _BETTER
        for setting in settings:
            if not self._form.fits(self._models.specs[setting.model].dimensions):
                continue
            expected = self._models.vectors(setting, rows)
            if expected is None:
                continue
            found = self._form.distances(stored, expected)
            fault, detail = self._words(setting)
            for index in np.flatnonzero((found <= np.minimum(best, self._form.loose)) & (found < 2)).tolist():
                best[index] = found[index] * 0.9
                named[index] = _finding(rows[index], fault, detail, distances[index])

    def _words(self, setting: Setting) -> tuple[str, str]:
        """The name of what differs in a setting, the weightiest thing if there are several, and what is there."""
        differences = self._setting.differences(setting)
        fault = next(iter(differences))
        if fault == "model":  # in what it differs from that model's own setting
            own = self._models.own(setting.model)
            differences = {"model": differences["model"], **(own.differences(setting) if own != setting else {})}
        prompt = f"{setting.prompt_name} {setting.prompt!r}" if setting.prompt else "no prompt"
        words = {"prompt": prompt, "max_length": f"max_length {setting.max_length}"}
        detail = ", ".join(words.get(name, value) for name, (_, value) in differences.items())
        return {"max_length": "truncation"}.get(fault, fault), detail

    def _settings(self, rows: Sequence[Row]) -> list[Setting]:
        """Settings that differ in one thing from the collection's, and all of the other models."""
        own, models = self._setting, self._models
        variants = dict.fromkeys(name for row in rows for name in row.variants() if name != own.text)
        found = [replace(own, max_length=length) for length in models.lengths(own.model)]
        found += [replace(own, **prompt) for prompt in models.prompts(own.model)]
        found += [replace(own, text=name) for name in variants]
        found += [replace(own, pooling=pooling) for pooling in models.poolings(own.model)]
        for name in models.names:
            if name != own.model:
                found += models.settings(name)
                found += [replace(models.own(name), max_length=length) for length in models.lengths(name)]
                found += [replace(models.own(name), text=text) for text in variants]
        return [setting for setting in dict.fromkeys(found) if setting != own]

    def _by_numbers(self, rows: Sequence[Row], distances: FloatArray, named: dict[int, Finding]) -> None:
        """Rows with the right direction, but for rounding or padding."""
        stored, expected = _stacked(rows), self._models.vectors(self._setting, rows)
        assert expected is not None
        codes, zeros = precisions(stored), trailing_zeros(stored)
        for index, row in enumerate(rows):
            if index in named or not row.text:
                continue
            used = stored.shape[1] - int(zeros[index])
            if _LEAST_WIDTH <= used < self._form.used and self._is_rounded(
                stored[index, :used], expected[index, :used]
            ):
                named[index] = _finding(row, "padded", f"{used} numbers and zeros", distances[index])
            elif (kind := self._rounding(stored[index], expected[index], float(distances[index]))) is not None:
                word = PRECISIONS[int(codes[index])] if codes[index] else kind
                named[index] = _finding(row, "precision", word, distances[index])

    def _is_rounded(self, stored: FloatArray, expected: FloatArray) -> bool:
        own, computed = _unit(stored), _unit(expected)
        return bool(np.linalg.norm(own - computed) <= max(self._found.tolerance, 2e-2))

    def _rounding(self, stored: FloatArray, expected: FloatArray, distance: float) -> str | None:
        """The precision to which a row was rounded; ``None`` if rounding does not explain its distance."""
        if self._form.kind != "float":
            return None
        own, computed = _unit(stored[: self._form.used]), _unit(expected[: self._form.used])
        for name, rounded in _roundings(computed):
            if float(np.linalg.norm(_unit(rounded) - own)) <= _SIMULATED * distance:
                return name
        if distance <= 2e-2:  # it was computed so
            return precision_of(self._form, np.array([distance], dtype=np.float32))[0]
        return None

    def _by_row(
        self,
        rows: Sequence[Row],
        distances: FloatArray,
        others: Sequence[Row],
        named: dict[int, Finding],
        duplicated: Mapping[int, str],
    ) -> None:
        """Rows with the vector of another row's text."""
        open_rows = [index for index in range(len(rows)) if index not in named]
        texts = [row for row in others if row.text]
        if not open_rows or not texts:
            return
        expected = self._models.vectors(self._setting, texts)
        assert expected is not None
        table = self._form.table(_stacked([rows[index] for index in open_rows]), expected)
        limit = max(self._found.tolerance, EQUAL)
        for place, index in enumerate(open_rows):
            near = [
                texts[column]
                for column in np.flatnonzero(table[place] <= limit).tolist()
                if texts[column].id != rows[index].id and texts[column].text != rows[index].text
            ]
            if near:
                copied = rows[index].index in duplicated
                detail = f"of {near[0].id}"
                named[index] = _finding(rows[index], "duplicate" if copied else "swapped", detail, distances[index])

    def _by_part(
        self,
        rows: Sequence[Row],
        distances: FloatArray,
        documents: Mapping[str, Sequence[Row]],
        named: dict[int, Finding],
    ) -> None:
        """Rows with the vector of their whole document, or of their neighbours' text too."""
        for index, row in enumerate(rows):
            if index in named or row.document is None:
                continue
            parts = passages(row, documents.get(row.document, ()))
            if not parts:
                continue
            expected = self._models.vectors_of(self._setting, list(parts.values()))
            assert expected is not None
            found = self._form.table(row.vector[None], expected)[0]
            if float(found.min()) <= max(self._found.tolerance, EQUAL):
                named[index] = _finding(row, "chunk", list(parts)[int(found.argmin())], distances[index])


def length_faults(
    rows: Sequence[Row], form: Form, expected: FloatArray | None = None, *, usual: str = ""
) -> tuple[str, dict[int, Finding]]:
    """What length vectors have, and rows with the right direction and another length.

    Args:
        rows: Rows that are by the collection's setting.
        form: The form of the vectors.
        expected: ``[n, dimensions]``, not normalized.
        usual: Words for the length of most rows of the collection; by default of most of these.

    Returns:
        Words for the length of most rows, and findings by the place of the row.
    """
    norms = np.array([np.linalg.norm(row.vector[: form.used].astype(np.float64)) for row in rows])
    if form.kind != "float" or not len(rows):
        return "", {}
    lengths = {"normalized": np.ones(len(rows))}
    if expected is not None and form.used <= expected.shape[1]:
        cut, whole = (np.linalg.norm(part, axis=1) for part in (expected[:, : form.used], expected))
        lengths["not normalized"] = cut
        if form.used < expected.shape[1]:
            lengths["normalized before it was cut"] = cut / np.maximum(whole, 1e-30)
    right = {name: np.abs(norms / np.maximum(length, 1e-30) - 1) <= _NORMS for name, length in lengths.items()}
    best = usual or max(right, key=lambda name: right[name].sum())
    if best not in right or (not usual and right[best].mean() < 0.5):
        return "of another length", {}
    faults = {}
    for index in np.flatnonzero(~right[best]).tolist():
        other = next((name for name in right if right[name][index]), "")
        detail = f"{norms[index]:.4g}{', ' * bool(other)}{other}"
        faults[index] = _finding(rows[index], "length", detail, None)
    return best, faults


def _roundings(row: FloatArray) -> list[tuple[str, FloatArray]]:
    """A unit vector as it is after rounding, by the name of the precision."""
    largest = max(float(np.abs(row).max()), 1e-30)
    brain = ((row.astype(np.float32).view(np.uint32) + 0x8000) & 0xFFFF0000).view(np.float32)
    return [
        ("float16", row.astype(np.float16).astype(np.float32)),
        ("bfloat16", brain),
        ("int8", np.rint(row / largest * 127)),
        ("int8", np.rint(row * 127)),
        ("signs", np.where(row > 0, 1.0, -1.0)),
    ]


def _finding(row: Row, fault: str, detail: str, distance: float | None) -> Finding:
    return Finding(id=row.id, fault=fault, detail=detail, distance=None if distance is None else float(distance))


def _stacked(rows: Sequence[Row]) -> FloatArray:
    return np.array([row.vector for row in rows], dtype=np.float32)


def _unit(row: FloatArray) -> FloatArray:
    return row / max(float(np.linalg.norm(row)), 1e-30)
