"""identify: the setting by which most of a few rows were made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from millpond.audit.candidates import Models, Setting
from millpond.audit.forms import LEVELS, Form
from millpond.audit.rows import Row
from millpond.ingest.sinks.batch import FloatArray

_SHORT, _LONG = 16, 8  # rows of the search, the long ones for where texts are cut
_POOL = 256  # of so many rows
_HOPELESS = 1.0  # of rows this far from all usual lengths another length is not the reason
_LONG_ROWS, _STEPS = 3, 9  # rows, and lengths at a time, of a search for the length at which texts were cut
_LEAST_CHARS = 12  # of a text that says much about its vector
# Of two settings, one is as near to a row as the other within this: the rest is rounding.
_NEAR, _ROUNDING = 1.5, 2e-6
_SPREAD = 3  # times the median distance has the farthest of rows of one precision: of MiniLM 1.3
_EXACT = dict(LEVELS)["bfloat16"]
_ENOUGH = 0.6  # of the rows are by a setting: the search for poolings and prompts ends


@dataclass(frozen=True, kw_only=True)
class Identification:
    """What the search found.

    Attributes:
        setting: The setting by which most rows were made; ``None`` if none of those that were tried fits.
        same: Settings that these rows do not tell from it.
        nearest: The setting nearest to the rows, whether it fits or not; ``None`` if no model has the width.
        distance: The median distance of the rows from it, as unit vectors.
        tried: How many settings were tried.
        level: The precision of the rows.
        tolerance: The largest distance of a row that is by the setting.
    """

    setting: Setting | None = None
    same: tuple[Setting, ...] = ()
    nearest: Setting | None = None
    distance: float = float("nan")
    tried: int = 0
    level: str = ""
    tolerance: float = 0.0


class Trial:
    """The distances of some rows from each setting that was tried."""

    def __init__(self, models: Models, form: Form, rows: Sequence[Row]) -> None:
        self._models, self._form, self.rows = models, form, rows
        self._stored = np.array([row.vector for row in rows], dtype=np.float32)
        self.distances: dict[Setting, FloatArray] = {}

    def add(self, settings: Iterable[Setting]) -> None:
        """Try settings."""
        for setting in settings:
            if setting in self.distances or not self._form.fits(self._models.specs[setting.model].dimensions):
                continue
            expected = self._models.vectors(setting, self.rows)
            if expected is not None:
                found = self._form.distances(self._stored, expected)
                self.distances[setting] = np.where(np.isnan(found), np.float32(2), found)

    def votes(self) -> dict[Setting, int]:
        """How many rows each setting is the nearest to, or as near, of those that some setting fits."""
        if not self.distances:
            return {}
        table = np.array(list(self.distances.values()))  # [settings, rows]
        least = table.min(axis=0)
        near = (table <= _NEAR * least + _ROUNDING) & (least <= self._form.loose)
        return dict(zip(self.distances, near.sum(axis=1).tolist(), strict=True))

    def best(self) -> list[Setting]:
        """The settings with the most votes, the nearest and likeliest first; empty if no row is by any."""
        votes = self.votes()
        most = max(votes.values(), default=0)
        if not most:
            return []
        chosen = [setting for setting, count in votes.items() if count == most]
        means = {each: self._mean(each) for each in chosen}
        least = min(means.values())
        return [each for each in chosen if means[each] <= 1.1 * least + _ROUNDING]

    def is_near(self, setting: Setting) -> bool:
        """Whether rows are so near to a setting that no other prompt or pooling can be meant."""
        return self._form.kind == "binary" or self._mean(setting) <= _EXACT

    def nearest(self) -> tuple[Setting, float] | None:
        """The setting with the least median distance."""
        medians = {setting: float(np.median(found)) for setting, found in self.distances.items()}
        best = min(medians, key=medians.__getitem__, default=None)
        return None if best is None else (best, medians[best])

    def _mean(self, setting: Setting) -> float:
        found = self.distances[setting]
        fitting = found[found <= self._form.loose]
        return float(fitting.mean()) if len(fitting) else 2.0


def identify(models: Models, form: Form, rows: Sequence[Row]) -> Identification:
    """The setting that made most of some rows.

    Args:
        models: The models that may have.
        form: The form of the vectors.
        rows: Rows in a random order, each with a vector.

    Returns:
        What was found.
    """
    short, long = _search_rows(rows)
    if not short:
        return Identification()
    trial = Trial(models, form, short)
    variants = _variants(short)
    for settings in _stages(models, variants):
        trial.add(settings)
        best = trial.best()
        if best and trial.votes()[best[0]] >= _ENOUGH * len(short) and trial.is_near(best[0]):
            break
    best = trial.best()
    tried = len(trial.distances)
    if not best:
        nearest = trial.nearest()
        setting, distance = nearest if nearest is not None else (None, float("nan"))
        return Identification(nearest=setting, distance=distance, tried=tried)
    whole = Trial(models, form, [*short, *long])
    whole.add(replace(each, max_length=length) for each in best for length in models.lengths(each.model))
    whole.add(replace(each, text=name) for each in best for name in variants)
    tied = whole.best() or best
    if (cut := _found_length(models, form, tied[0], whole)) is not None:
        whole.add([cut])
        tied = whole.best()
    chosen = tied[0]
    distances = whole.distances[chosen]
    level, tolerance = precision_of(form, distances)
    return Identification(
        setting=chosen,
        same=tuple(tied[1:]),
        nearest=chosen,
        distance=float(np.median(distances)),
        tried=tried + len(whole.distances),
        level=level,
        tolerance=tolerance,
    )


def _found_length(models: Models, form: Form, setting: Setting, trial: Trial) -> Setting | None:
    """The setting with another length, where long texts were cut at none that people usually choose.

    The nearer a length is to the right one, the nearer are the vectors: it is between the neighbours of the nearest.
    """
    distances = trial.distances[setting]
    fitting = distances[distances <= form.loose]
    usual = float(np.quantile(fitting, 0.1)) if len(fitting) else 0.0  # most texts may be cut
    strange = np.flatnonzero((distances > max(10 * usual, 1e-4)) & (distances < 2)).tolist()
    rows = sorted((trial.rows[index] for index in strange), key=lambda row: len(row.text or ""))[-_LONG_ROWS:]
    if not rows:
        return None
    lengths = [1, *sorted(models.lengths(setting.model))]
    search = Trial(models, form, rows)
    while True:
        search.add(replace(setting, max_length=length) for length in lengths[1:])
        tried = [search.distances.get(replace(setting, max_length=each)) for each in lengths]
        medians = [2.0 if each is None else float(np.median(each)) for each in tried]
        place = int(np.argmin(medians))
        low, high = lengths[max(place - 1, 0)], lengths[min(place + 1, len(lengths) - 1)]
        if high - low <= 2 or medians[place] > _HOPELESS:
            chosen = replace(setting, max_length=lengths[place])
            return chosen if medians[place] <= max(10 * usual, 1e-4) and chosen != setting else None
        steps = np.unique(np.linspace(low, high, _STEPS).astype(int)).tolist()
        lengths = sorted({*steps, lengths[place]})


def precision_of(form: Form, distances: FloatArray) -> tuple[str, float]:
    """The precision of most rows that fit, and the largest distance of such a row."""
    fitting = distances[distances <= form.loose]
    if form.kind == "binary":
        return "binary", form.loose
    middle = float(np.median(fitting)) if len(fitting) else 0.0
    for name, limit in LEVELS:
        if middle <= limit:
            words = form.rounded if form.rounded in dict(LEVELS) and form.rounded != "float32" else name
            return words if form.kind == "float" else form.kind, min(max(limit, _SPREAD * middle), form.loose)
    return LEVELS[-1][0], form.loose


def _stages(models: Models, variants: Sequence[str]) -> Iterator[list[Setting]]:
    """What is tried one after the other: each model by itself, then prompts, texts, poolings and shorter cuts."""
    yield [models.own(name) for name in models.names]
    own = {name: list(models.settings(name, poolings=models.poolings(name)[:1])) for name in models.names}
    yield [setting for name in models.names for setting in own[name]]
    yield [replace(setting, text=text) for name in models.names for setting in own[name] for text in variants]
    others = {name: list(models.settings(name, poolings=models.poolings(name)[1:])) for name in models.names}
    yield [setting for name in models.names for setting in others[name]]
    yield [
        replace(setting, max_length=length)
        for name in models.names
        for setting in (*own[name], *others[name])
        for length in models.lengths(name)
    ]
    yield [replace(setting, text=text) for name in models.names for setting in others[name] for text in variants]


def _search_rows(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """Rows with short texts, whichever way those are cut, and rows with the longest ones."""
    known: dict[str, Row] = {}
    for row in rows[:_POOL]:
        if row.text and row.text.strip():
            known.setdefault(row.text, row)
    by_length = sorted(known.values(), key=lambda row: len(row.text or ""))
    usual = [row for row in by_length if len(row.text or "") >= _LEAST_CHARS] or by_length
    short = usual[:_SHORT]
    return short, [row for row in usual[-_LONG:] if row not in short]


def _variants(rows: Sequence[Row]) -> list[str]:
    """The other texts of these rows that differ from the stored ones."""
    names: dict[str, None] = {}
    for row in rows:
        found = row.variants()
        names.update(dict.fromkeys(name for name, text in found.items() if text != row.text))
    return list(names)
