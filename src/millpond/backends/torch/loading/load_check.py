"""The self-check at load: the rows of the kernels that a model will use, and its graphs beside the same forward."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from time import perf_counter

import numpy as np
import torch

from millpond.backends.backend import OutputSpec, PackedBatch
from millpond.backends.device_errors import is_device_lost, is_out_of_memory
from millpond.backends.kernel_check import LENGTHS, Case, KernelCheck, Numbers, Row, check, first_line, similarity, warn
from millpond.backends.torch.attention import kernels
from millpond.backends.torch.attention.self_check import attention_rows, computed, device_name, made_of
from millpond.backends.torch.cuda import fused
from millpond.backends.torch.cuda.graphs import Graphs
from millpond.backends.torch.device_batch import DeviceBatch
from millpond.backends.torch.model import TorchModel

logger = logging.getLogger(__name__)

# A batch of the same shape as LENGTHS: a graph that was captured with those is replayed with these.
_OTHER_LENGTHS = (33, 9, 40, 2)
# Two forwards in half precision round differently; a wrong norm, rotation or activation is off by far more.
_FORWARD_LEAST = 0.98
_POOLED, _TOKENS = OutputSpec(kind="pooled"), OutputSpec(kind="tokens")


def check_kernels(dtype: torch.dtype, *, remembered: bool = True) -> list[KernelCheck]:
    """Run the rows of what a model may use on a CPU; what is wrong serves nothing in this process."""
    with _never_failing(), torch.inference_mode():
        return check(attention_rows(torch.device("cpu"), dtype), remembered=remembered)
    return []


def check_model(
    model: TorchModel, dtype: torch.dtype, *, vocabulary: int, longest: int, remembered: bool = True
) -> list[KernelCheck]:
    """The same for a model on a GPU, whose kernels are compiled for its calls; then its graphs.

    Compiling takes seconds for the first model of a shape on a machine; Triton keeps what it has compiled.
    """
    found: list[KernelCheck] = []
    with _never_failing(), torch.inference_mode():
        packed = _packed(LENGTHS, vocabulary, longest, model.position_offset)
        with kernels.observed() as kinds, fused.left_out():
            expected = _states(model, packed)
        found += check(attention_rows(model.placement, dtype, kinds), remembered=remembered)
        if dtype is not torch.float32:
            found += check([_fused_row(model, packed, dtype, expected)], remembered=False)
    return found + check_graphs(model, vocabulary=vocabulary, longest=longest)


def _fused_row(model: TorchModel, packed: PackedBatch, dtype: torch.dtype, expected: Numbers) -> Row:
    """A model's forward by the kernels between its products, beside that by torch's operators."""

    def found() -> Numbers:
        with kernels.observed():
            return _states(model, packed)

    case = Case(call=f"a forward of {len(packed.ids)} tokens", found=found, expected=lambda: expected)
    return Row(
        kernel=fused.NAME,
        name=fused.NAME,
        precision=str(dtype).removeprefix("torch."),
        device=device_name(model.placement),
        made_of=made_of(),
        cases=lambda: [case] if np.isfinite(expected).all() else [],
        least=_FORWARD_LEAST,
        otherwise="They are not used in this process any more; torch's operators serve.",
    )


def _states(model: TorchModel, packed: PackedBatch) -> Numbers:
    states = model.states(DeviceBatch(packed=packed, device=model.placement))
    return computed(model.placement, lambda: states)


def check_graphs(model: TorchModel, *, vocabulary: int, longest: int) -> list[KernelCheck]:
    """Replay a graph with the batch that it was captured with, and with another one; a wrong one is the last."""
    if model.graphs is None:
        return []
    with _never_failing(), torch.inference_mode():
        packed = _packed(LENGTHS, vocabulary, longest, model.position_offset)
        other = _packed(_OTHER_LENGTHS, vocabulary, longest, model.position_offset, start=1000)
        return [_check_graphs(model, model.graphs, (packed, packed, packed, other))]
    return []


@contextmanager
def _never_failing() -> Iterator[None]:
    """Whatever goes wrong here is logged for who debugs, and the model serves: its first batch shows what it is."""
    try:
        yield
    except Exception as error:
        logger.debug("the self-check could not run", exc_info=error)


def _packed(lengths: Sequence[int], vocabulary: int, longest: int, offset: int, *, start: int = 0) -> PackedBatch:
    """Texts of these lengths, none longer than ``longest``, of other tokens for another ``start``."""
    lengths = [min(length, longest) for length in lengths]
    places = np.arange(start, start + sum(lengths), dtype=np.uint64)
    return PackedBatch(
        bounds=np.array([0, *accumulate(lengths)], dtype=np.int32),
        ids=((places * 2654435761 + 12345) % vocabulary).astype(np.int32),  # from all over the vocabulary
        positions=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]) + np.int32(offset),
        types=None,
        adapters=None,
        skip=None,
        keys=None,
        prefixes=None,
    )


def _check_graphs(model: TorchModel, graphs: Graphs, batches: Sequence[PackedBatch]) -> KernelCheck:
    start = perf_counter()
    near: list[float] = []
    obstacle: str | None = None
    try:
        for packed in batches:
            near += _replayed(model, graphs, packed)
    except Exception as error:
        if is_device_lost(error) or is_out_of_memory(error):
            raise
        logger.debug("a graph raised in the self-check", exc_info=error)
        obstacle = first_line(error)
    finally:
        graphs.clear()
    found = KernelCheck(
        kernel="graphs",
        call=f"a batch of {len(batches[0].ids)} tokens on {model.device}",
        similarity=min(near, default=None) if obstacle is None else None,
        least=0.999,
        obstacle=obstacle if obstacle is not None or near else "this model runs without graphs",
        raised=obstacle is not None,
        seconds=perf_counter() - start,
    )
    if found.wrong:
        graphs.switch_off()
        consequence = "This engine runs without graphs: small batches take longer."
        warn("a replayed CUDA graph", found, made_of=made_of(), consequence=consequence)
    return found


def _replayed(model: TorchModel, graphs: Graphs, packed: PackedBatch) -> list[float]:
    """How near a replay comes to the same forward without a graph; nothing if none is replayed."""
    assert model.streams is not None
    with model.streams.computing():
        replayed = graphs.run(packed, frozenset((_POOLED, _TOKENS)))
        if replayed is None:
            return []
        batch = DeviceBatch(packed=packed, device=model.placement)
        states = model.states(batch)
        rows = model.pooler_call(batch, states).rows(_POOLED).values
        if not (states.isfinite().all() and rows.isfinite().all()):
            return []
        assert replayed.states is not None
        pairs = ((replayed.states, states), (replayed.rows[_POOLED], rows))
        return [similarity(*(part.detach().float().cpu().numpy() for part in pair)) for pair in pairs]
