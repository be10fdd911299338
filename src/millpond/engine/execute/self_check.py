"""The self-check of a loaded model: a small batch through its weights on its device, with and without graphs.

Each call of attention is compared with float32 SDPA (:mod:`millpond.attention.self_check`), and a replayed graph with
the same forward without one. A native forward was compared when it was built. Nothing here makes loading fail.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from time import perf_counter

import numpy as np
import torch

from millpond.attention import kernels
from millpond.attention.segments import Segments
from millpond.attention.self_check import (
    LENGTHS,
    BudgetSpentError,
    CallChecks,
    KernelCheck,
    device_name,
    similarity,
    token_ids,
    warn_once,
)
from millpond.attention.signature import Masking
from millpond.engine.execute.batch import DeviceBatch
from millpond.engine.execute.cuda.graphs import Graphs
from millpond.engine.execute.device_errors import is_device_lost, is_out_of_memory
from millpond.engine.execute.packing import PackedRequests
from millpond.engine.execute.runner import Runner
from millpond.models.native.encoder import NativeEncoder
from millpond.pooling.pooler import Readout

logger = logging.getLogger(__name__)

# Seconds after which no further call of a forward is compared. On a CPU the forward itself takes them.
_SECONDS, _CPU_SECONDS = 1.0, 0.15
# A batch of the same shape as LENGTHS: a graph that was captured with those is replayed with these.
_OTHER_LENGTHS = (33, 9, 40, 2)
_POOLED, _TOKENS = Readout(kind="pooled"), Readout(kind="tokens")


def check_runner(
    runner: Runner, *, dtype: torch.dtype, vocabulary: int, longest: int, limited_keys: bool = False
) -> list[KernelCheck]:
    """Compare what a model is going to use: kernels that are wrong are taken out of the table, graphs switched off.

    Args:
        runner: The model, before its first batch.
        dtype: Precision of its backbone.
        vocabulary: Number of its token ids.
        longest: Most tokens of a text.
        limited_keys: Whether it has batches with limited keys, as ColBERT queries have.

    Returns:
        Every comparison, in order; none for a native forward.
    """
    if isinstance(runner.backbone, NativeEncoder):
        return []
    on_cpu = runner.device.type == "cpu" and runner.backend is None
    checks = CallChecks(seconds=_CPU_SECONDS if on_cpu else _SECONDS)
    packed = _packed(LENGTHS, vocabulary, longest, runner.position_offset)
    batches = [packed, _with_limited_keys(packed)] if limited_keys else [packed]
    found: list[KernelCheck] = []
    with (
        _never_failing(runner),
        torch.inference_mode(),
        runner.backend.computing() if runner.backend else nullcontext(),
    ):
        if not on_cpu or dtype is torch.bfloat16:
            for batch in batches:
                with checks.watching():
                    runner.forward(DeviceBatch(packed=batch, device=runner.device))
        elif dtype is torch.float32:
            _check_narrow_window(checks)
    with _never_failing(runner), torch.inference_mode():
        if runner.graphs is not None:
            other = _packed(_OTHER_LENGTHS, vocabulary, longest, runner.position_offset, start=1000)
            found.append(_check_graphs(runner, runner.graphs, (packed, packed, packed, other)))
    return checks.results + found


@contextmanager
def _never_failing(runner: Runner) -> Iterator[None]:
    """Whatever goes wrong here is logged for who debugs, and the model serves: its first batch shows what it is."""
    try:
        yield
    except BudgetSpentError:
        logger.debug("the self-check has compared the first layers only")
    except Exception as error:
        logger.debug("the self-check of %s could not run", type(runner.backbone).__name__, exc_info=error)


def _check_narrow_window(checks: CallChecks) -> None:
    """On a CPU in float32 only texts much longer than a window are served by another kernel than SDPA."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((sum(LENGTHS), heads, 32), generator=random) for heads in (4, 2, 2))
    with checks.watching():
        kernels.attend(q, k, v, Segments.of(LENGTHS), Masking(scale=32**-0.5, causal=False, window=9))


def _packed(lengths: Sequence[int], vocabulary: int, longest: int, offset: int, *, start: int = 0) -> PackedRequests:
    """Texts of these lengths, none longer than ``longest``, of other tokens for another ``start``."""
    lengths = [min(length, longest) for length in lengths]
    return PackedRequests(
        requests=(),
        lead=0,
        bounds=np.array([0, *accumulate(lengths)], dtype=np.int32),
        ids=token_ids(sum(lengths), vocabulary, start=start),
        positions=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]) + np.int32(offset),
        types=None,
        adapters=None,
        skip=None,
        keys=None,
        prefixes=None,
    )


def _with_limited_keys(packed: PackedRequests) -> PackedRequests:
    keys = [max(1, int(length) // 3) for length in packed.lengths]
    return PackedRequests(**{**vars(packed), "keys": keys})


def _check_graphs(runner: Runner, graphs: Graphs, batches: Sequence[PackedRequests]) -> KernelCheck:
    """Replay a graph with the batch that it was captured with, and with another one; the graph is dropped."""
    assert runner.backend is not None
    call = f"a batch of {len(batches[0].ids)} tokens"
    start = perf_counter()
    near: list[float] = []
    obstacle: str | None = None
    try:
        for packed in batches:
            with runner.backend.computing():
                replayed = graphs.run(packed, frozenset((_POOLED, _TOKENS)))
                if replayed is None:
                    continue
                batch = DeviceBatch(packed=packed, device=runner.device)
                states = runner.states(batch)
                rows = runner.reading(batch, states).rows(_POOLED).values
                if not (states.isfinite().all() and rows.isfinite().all()):
                    continue
                assert replayed.states is not None
                near.append(similarity(replayed.states, states))
                near.append(similarity(replayed.rows[_POOLED], rows))
    except Exception as error:
        if is_device_lost(error) or is_out_of_memory(error):
            raise
        logger.debug("a graph raised in the self-check", exc_info=error)
        obstacle = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    finally:
        graphs.clear()
    check = KernelCheck(
        kernel="graphs",
        call=call,
        similarity=min(near, default=None) if obstacle is None else None,
        obstacle=obstacle if obstacle is not None or near else "this model runs without graphs",
        raised=obstacle is not None,
        seconds=perf_counter() - start,
    )
    if check.wrong:
        graphs.switch_off()
        consequence = "This engine runs without graphs, which is slower for small batches."
        warn_once("a replayed CUDA graph", check, device=device_name(runner.device), consequence=consequence)
    return check
