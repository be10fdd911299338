"""Smoothing (SmoothQuant) of what products in eight bits read.

A row of states is quantized by its own range, which a few large columns take for themselves. So a norm's weights are
divided by a factor for each column, and the inner numbers of the weight that reads its states are multiplied by it. The
factors come from the states of random tokens: which columns are large depends on the model, hardly on the text.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.backends.native import structs
from millpond.backends.native.kernels import Kernels
from millpond.backends.native.memory import Memory, floats_at

_TEXTS, _LENGTH = 16, 16
_LARGE_MODEL, _LARGE_TEXTS = 1 << 30, 4  # weights of a model that takes seconds for so many
_BLOCK = 256  # tokens
_MOST = 16.0  # a factor, and one divided by it

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False)
class SmoothedNorm:
    """A norm whose states only a weight in eight bits reads, and perhaps the residual of a later norm."""

    step: int
    weight: structs.Weight
    residual: int | None  # the step of that later norm


def smoothed_norms(steps: Sequence[Any], in_int8: Callable[[structs.Weight], bool]) -> list[SmoothedNorm]:
    """The norms of a plan's steps that can be smoothed; ``in_int8`` tells which weights are in eight bits."""
    found, refused = [], set()
    for i, step in enumerate(steps):
        weight = step.sources[0]
        if weight is None or not _reads_states(step):
            continue
        norm = None
        quantized = step.kind == structs.FEED or (step.kind == structs.PRODUCT and step.target == 0)
        if i and quantized and in_int8(weight):
            norm = _smoothed(steps, i - 1, weight)
        if norm is None:
            refused.add(id(weight))  # another step may share it
        else:
            found.append(norm)
    return [norm for norm in found if id(norm.weight) not in refused]


def _smoothed(steps: Sequence[Any], i: int, weight: structs.Weight) -> SmoothedNorm | None:
    norm = steps[i]
    known = norm.kind == structs.NORM and norm.norm.kind in (structs.LAYER_NORM, structs.RMS_NORM)
    if not known or norm.target != 0 or norm.columns != weight.in_:
        return None
    for j in range(i + 2, len(steps)):
        later = steps[j]
        if later.kind == structs.NORM and later.target not in (2, 3):
            return SmoothedNorm(step=i, weight=weight, residual=j if later.residual else None)
        if _reads_states(later):
            return None
    return None  # the states are the result


def _reads_states(step: Any) -> bool:
    if step.kind == structs.NORM:
        return bool(step.residual)
    if step.kind in (structs.PRODUCT, structs.ADAPT):
        return bool(step.target == 0 or (step.kind == structs.PRODUCT and step.target == 4))
    return step.kind in (structs.FEED, structs.EXPERTS, structs.KEEP, structs.BLEND)


def factors_of(
    norms: Sequence[SmoothedNorm],
    model: structs.Model,
    kernels: Kernels,
    *,
    weights: int,  # numbers of all
    vocabulary: int,
    positions: int,
) -> dict[int, Floats]:
    """The factors ``[in]`` of each weight, by its ``id``; ``model``: whose weights are packed without factors."""
    texts = _LARGE_TEXTS if weights > _LARGE_MODEL else _TEXTS
    peaks = _peaks(model, kernels, vocabulary, texts, min(_LENGTH, positions or _LENGTH))
    of_weight: dict[int, Floats] = {}
    for norm in norms:
        own = peaks[norm.step, : norm.weight.in_]
        of_weight[id(norm.weight)] = np.maximum(own, of_weight.get(id(norm.weight), own))
    return {weight: _factors(own) for weight, own in of_weight.items()}


def _factors(peaks: Floats) -> Floats:
    factors = np.ones_like(peaks)
    used = peaks > 0
    if used.any() and np.isfinite(peaks).all():
        ratios = peaks[used] / np.median(peaks[used])
        factors[used] = np.clip(np.sqrt(ratios), 1 / _MOST, _MOST)
    return factors


def _peaks(model: structs.Model, kernels: Kernels, vocabulary: int, texts: int, length: int) -> Floats:
    """``[steps, hidden]``: the largest magnitude of each column of the norms' states."""
    ids = (np.arange(texts * length, dtype=np.int64) * 2654435761 % vocabulary).astype(np.int32)
    bounds = np.arange(texts + 1, dtype=np.int32) * np.int32(length)
    peaks = np.zeros((model.count, model.hidden), dtype=np.float32)
    out = np.empty((texts, model.output), dtype=np.float32)
    call = structs.EncodeCall(
        ctypes.pointer(model), texts=texts, reading=structs.MEAN_ROW, block=_BLOCK, threads=1, peaks=peaks.ctypes.data
    )
    call.ids, call.bounds, call.out = (part.ctypes.data for part in (ids, bounds, out))
    workspace = Memory(int(kernels.workspace(ctypes.addressof(call))))
    call.workspace = workspace.address
    kernels.encode(ctypes.addressof(call))
    return peaks


def smooth(steps: Any, norm: SmoothedNorm, factors: Floats) -> Iterator[Floats]:
    """Let a norm's states be divided by factors; returns what the steps point to from now on."""
    own, columns = steps[norm.step].norm, len(factors)
    for name in ("weight", "bias"):
        address = getattr(own, name)
        if address is None and name == "bias":
            continue
        numbers = np.ones(columns, np.float32) if address is None else floats_at(address, columns)
        divided = numbers / factors
        setattr(own, name, divided.ctypes.data)
        yield divided
    if norm.residual is not None:
        steps[norm.residual].state_factors = factors.ctypes.data
        yield factors
