"""The stop rule of a reranking: how probable it is that the documents not scored yet change the best ones."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# Fewer scores do not tell how much the scores vary around the line.
_LEAST_SCORES = 8
_MORE_SCORES = 3  # than there are best ones
_ROUNDING = float(np.finfo(np.float32).eps)  # scores have no smaller deviation


def least_scores(best: int) -> int:
    """How many scores the rule needs."""
    return max(_LEAST_SCORES, best + _MORE_SCORES)


def chance_of_change(expected: Floats, scores: Floats, rest: Floats, *, best: int) -> float:
    """The probability that any document of the ``rest`` belongs to the ``best`` ones.

    It is that of a linear regression of the scores on what was expected of the documents: a score that is not known
    has Student's t distribution around the line, with the residuals' deviation and the line's own error (its posterior
    predictive distribution under the usual flat prior). So it holds whenever it is asked, also again after each part.
    The line only rises with what was expected, and predicts no score below the lowest one seen.

    Args:
        expected: ``[m]`` what was expected of the scored documents, in any unit; higher is better.
        scores: ``[m]`` their scores.
        rest: ``[r]`` what is expected of the others.
        best: How many documents are wanted, at most ``m``.
    """
    count = len(scores)
    if count < least_scores(best):
        return 1.0
    least = np.sort(scores)[-best]
    middle, mean = expected.mean(), scores.mean()
    spread = float(((expected - middle) ** 2).sum())
    slope = max(0.0, float(((expected - middle) * (scores - mean)).sum()) / spread) if spread > 0 else 0.0
    residuals = scores - mean - slope * (expected - middle)
    degrees = count - 2
    deviation = math.sqrt(float((residuals**2).sum()) / degrees)
    predicted = np.maximum(mean + slope * (rest - middle), scores.min())
    leverage = (rest - middle) ** 2 / spread if spread > 0 else np.zeros(len(rest))
    deviations = deviation * np.sqrt(1 + 1 / count + leverage)
    gaps = (least - predicted) / np.maximum(deviations, _ROUNDING * max(1.0, float(np.abs(scores).max())))
    return -math.expm1(sum(math.log1p(-min(_upper_tail(gap, degrees), 0.5)) for gap in gaps.tolist()))


def _upper_tail(t: float, degrees: int) -> float:
    """P(T > t) of Student's distribution, by Wallace's transformation to the normal one (1959)."""
    z = (8 * degrees + 1) / (8 * degrees + 3) * math.sqrt(degrees * math.log1p(t * t / degrees))
    return 0.5 * math.erfc(math.copysign(z, t) / math.sqrt(2))
