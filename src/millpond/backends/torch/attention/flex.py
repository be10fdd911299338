"""FlexAttention: CUDA attention with a softcap (Gemma 2), which torch's flash kernels do not have.

It is compiled for each kind of call, for any lengths, windows and keys (``key_blocks.py``). What
cannot be compiled is left to the next kernel: uncompiled, it writes out all scores of the row, gigabytes a layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import torch

from millpond.backends.torch.attention.key_blocks import BLOCK, KeyBlocks
from millpond.backends.torch.attention.segments import Segments
from millpond.backends.torch.attention.signature import KernelError, Masking

NAME = "flex"
SERVES = "CUDA with a softcap"

# Compilations of one kind that torch allows: it has one for a single block of tokens, one for less, one for more. The
# default of 8 is enough; torch before 2.12 has no such option.
_COMPILATIONS = 32
# The narrowest head that its kernels compute.
_NARROWEST = 16
# On what dimension the number of tokens or blocks is, of query, key and value and of the fields of KeyBlocks.
_CHANGING = ((2,), (2,), (2,), (0,), (0,), (2,), (2, 3), (2,), (2, 3))


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """What compiled code depends on."""

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, query: torch.Tensor, key: torch.Tensor, masking: Masking) -> _Kind:
        return cls(
            heads=query.shape[1],
            kv_heads=key.shape[1],
            dim=query.shape[2],
            dtype=query.dtype,
            device=query.device,
            scale=masking.scale,
            softcap=masking.softcap,
        )


_ran: set[_Kind] = set()
_refused: set[_Kind] = set()


def unavailable() -> str | None:
    """Why it cannot run on this machine; ``None`` if it can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    from torch.utils._triton import has_triton

    return None if has_triton() else "Triton is missing, or too new for this GPU"


def fits(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, segments: Segments, masking: Masking) -> bool:
    """CUDA with a softcap, and neither a bias nor a shared prefix, which the masks below do not express."""
    return (
        query.device.type == "cuda"
        and masking.softcap is not None
        and masking.bias is None
        and not segments.shared
        and query.shape[-1] >= _NARROWEST
        and not (_refused and _Kind.of(query, key, masking) in _refused)
    )


def attend(
    query: torch.Tensor,  # [tokens, heads, dim]
    key: torch.Tensor,  # [tokens, kv_heads, dim]
    value: torch.Tensor,  # [tokens, kv_heads, dim]
    segments: Segments,
    masking: Masking,
    *,
    flex: Callable[..., Any] | None = None,
) -> torch.Tensor:  # [tokens, heads, dim]
    """Attention within each segment, for a call that fits; ``flex`` replaces the compiled function, for tests."""
    blocks = key_blocks(segments, masking)
    operands = [
        *(states.transpose(0, 1)[None] for states in (query, key, value)),  # [1, heads, tokens, dim]
        *(blocks.first, blocks.stop, blocks.partial_count, blocks.partial, blocks.full_count, blocks.full),
    ]
    kind = _Kind.of(query, key, masking)
    out = _run_compiled(kind, operands) if flex is None else _function(kind, flex)(*operands)
    result: torch.Tensor = out[0].transpose(0, 1)
    return result


def key_blocks(segments: Segments, masking: Masking) -> KeyBlocks:
    """The keys of each row, made once for all layers of a forward that have this window and causality."""
    window = masking.window if masking.window is not None and masking.window < segments.max_seqlen else None
    return segments.derive(
        (NAME, masking.causal, window), lambda: KeyBlocks.of(segments, causal=masking.causal, window=window)
    )


def score_mod(softcap: float | None) -> Callable[..., torch.Tensor] | None:
    """The softcap as FlexAttention's score modifier."""
    if softcap is None:
        return None

    def cap(score: torch.Tensor, _b: Any, _h: Any, _q: Any, _k: Any) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


def _function(kind: _Kind, flex: Callable[..., Any]) -> FunctionType:
    """The function to compile: tensors in and out, everything else a constant."""
    from torch.nn.attention.flex_attention import BlockMask

    capped, scale, enable_gqa = score_mod(kind.softcap), kind.scale, kind.heads != kind.kv_heads

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *blocks: torch.Tensor) -> Any:
        first, stop, partial_count, partial, full_count, full = blocks

        def allowed(_b: Any, _h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            return (k >= first[q]) & (k < stop[q])

        mask = BlockMask.from_kv_blocks(
            partial_count,
            partial,
            full_count,
            full,
            BLOCK_SIZE=BLOCK,
            mask_mod=allowed,
            seq_lengths=(query.shape[2], query.shape[2]),
            compute_q_blocks=False,  # only a backward pass reads them
        )
        return flex(query, key, value, score_mod=capped, block_mask=mask, scale=scale, enable_gqa=enable_gqa)

    # torch limits the compilations of a code object: each kind gets one of its own.
    return FunctionType(attention.__code__.replace(), attention.__globals__, "attention", None, attention.__closure__)


@cache
def _compiled(kind: _Kind) -> Callable[..., torch.Tensor]:
    """The attention of one kind of call, compiled at its first call.

    With ``fullgraph`` torch raises an error where it would go on uncompiled.
    """
    from torch.nn.attention.flex_attention import flex_attention

    def flex(*operands: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling():
            raise _NotCompiledError("torch's compiler is switched off")
        return flex_attention(*operands, **options)

    options: dict[str, Any] = {"fullgraph": True}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options["recompile_limit"] = _COMPILATIONS
    return torch.compile(_function(kind, flex), **options)


class _NotCompiledError(Exception):
    """The function runs as written: by a variable such as TORCHDYNAMO_DISABLE, or by ``torch.compiler.set_stance``."""


def _run_compiled(kind: _Kind, operands: list[torch.Tensor]) -> torch.Tensor:
    for operand, dimensions in zip(operands, _CHANGING, strict=True):
        for dimension in dimensions:
            torch._dynamo.maybe_mark_dynamic(operand, dimension)
    try:
        out = _compiled(kind)(*operands)
    except Exception as error:
        reason = _reason_against(kind, error)
        if reason is None:
            raise
    else:
        _ran.add(kind)
        return out
    _refused.add(kind)
    raise KernelError(
        f"attention kernel {NAME} (torch {torch.__version__}) cannot compile attention with a softcap for "
        f"{kind.heads} heads of {kind.dim} in {str(kind.dtype).removeprefix('torch.')}: {reason}. A slower kernel "
        "computes it in this process. Triton and a C compiler must be installed for torch to compile, and "
        "TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE unset"
    )


def _reason_against(kind: _Kind, error: BaseException) -> str | None:
    """Why calls of this kind cannot be compiled, in a line; ``None`` if the error says nothing of the kind.

    A kind that ran before is compiled; then only the compiler's own errors count. Lack of memory never does: the batch
    is run again in parts.
    """
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and cause not in causes:
        causes.append(cause)
    if any(isinstance(cause, MemoryError | torch.OutOfMemoryError | torch.AcceleratorError) for cause in causes):
        return None
    compiling = (TorchDynamoException, FailOnRecompileLimitHit, _NotCompiledError, OSError, ImportError)
    if kind in _ran and not isinstance(error, compiling):
        return None
    return str(error).strip().partition("\n")[0] or type(error).__name__
