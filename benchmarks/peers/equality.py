"""Equality check: the time of an engine counts only if its results equal those of the reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one precision for the comparison with float32.

    Attributes:
        mean_cosine: Smallest allowed mean cosine over the rows.
        min_cosine: Smallest allowed cosine of any row. Finds a single wrong row, which hardly changes the mean.
        score: Largest allowed difference of a score, for scores between 0 and 1.
        correlation: Smallest allowed correlation of the scores. Finds a wrong order; near ties hardly change it.
    """

    mean_cosine: float
    min_cosine: float
    score: float
    correlation: float


LIMITS = {
    "float32": Limits(mean_cosine=0.99999, min_cosine=0.9999, score=0.001, correlation=0.999),
    "half": Limits(mean_cosine=0.999, min_cosine=0.99, score=0.05, correlation=0.99),
    "int8": Limits(mean_cosine=0.99, min_cosine=0.97, score=0.1, correlation=0.95),
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a result equals the reference within the limits, and the measured differences."""

    equal: bool
    figures: Mapping[str, float]


def judge(result: Mapping[str, Array], reference: Mapping[str, Array], precision: str) -> Verdict:
    """Compare an engine's arrays with the reference's; both as written by ``peers.process``."""
    limits = LIMITS[precision]
    if "scores" in reference:
        return judge_scores(result["scores"], reference["scores"], limits)
    if "offsets" in reference and not np.array_equal(result["offsets"], reference["offsets"]):
        return Verdict(equal=False, figures={})  # different tokens: rows cannot be paired
    return judge_vectors(result["vectors"], reference["vectors"], limits)


def judge_vectors(vectors: Array, reference: Array, limits: Limits) -> Verdict:
    """Compare vectors row by row, ``[n, d]`` and ``[n, d]``."""
    if vectors.shape != reference.shape:
        return Verdict(equal=False, figures={})
    ours, theirs = vectors.astype(np.float64), reference.astype(np.float64)
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)  # [n]
    cosines = (ours * theirs).sum(1) / np.maximum(lengths, 1e-30)
    mean, least = float(cosines.mean()), float(cosines.min())
    equal = mean >= limits.mean_cosine and least >= limits.min_cosine  # False for NaN
    return Verdict(equal=equal, figures={"mean_cosine": round(mean, 6), "min_cosine": round(least, 6)})


def judge_scores(scores: Array, reference: Array, limits: Limits) -> Verdict:
    """Compare scores by value and by order, ``[n]`` and ``[n]``."""
    if scores.shape != reference.shape:
        return Verdict(equal=False, figures={})
    difference = float(np.abs(scores.astype(np.float64) - reference.astype(np.float64)).max())
    correlation = float(np.corrcoef(scores, reference)[0, 1])
    equal = difference <= limits.score and correlation >= limits.correlation
    figures = {"max_difference": round(difference, 6), "correlation": round(correlation, 6)}
    return Verdict(equal=equal, figures=figures)
