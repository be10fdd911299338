"""The self-check of a native encoder: some of its layers, beside the same layers in torch's operators in float32.

It runs when a model is loaded, so it may cost neither seconds nor a second copy of the weights:

- The layers are the first of each kind of attention, at least two and at most four; the weights are the model's own.
  The other layers run through the same kernels, which their weights do not change. A step of the plan that is left out
  or damaged in a layer of no such kind would not be seen; a kernel that is wrong on a processor is.
- torch's side is computed before the weights are packed, since packing a decoder takes its layers apart. Layers in
  bfloat16 are copied to float32 if they are small, and the copies dropped at once; a large one runs as it is.
- The native side is the plan with the steps of these layers only: structs that point to the packed weights.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from millpond.attention import kernels, sdpa
from millpond.attention.segments import Segments
from millpond.attention.self_check import LEAST, LENGTHS, KernelCheck, similarity, token_ids
from millpond.checkpoints.architecture import Architecture
from millpond.models.native.encoder import NativeEncoder, Rows, bounds_of
from millpond.models.native.kernels import Int8
from millpond.native import library

logger = logging.getLogger(__name__)

# The similarity (see attention/self_check.py) from which the states are right. That of MiniLM is 0.99998 in bfloat16
# and 0.9992 in eight bits; the least of random models of every family, whose weights are large, is 0.9992 and 0.994.
# In float32 it is more than 0.999999.
_LEAST = {torch.float32: LEAST, torch.bfloat16: 0.995}
_LEAST_INT8 = 0.98
# How many times as far off as rounded numbers in torch a right forward may be: these are rounded in fewer places.
_ROUNDINGS = 8
# How often: only some of the differences of a text become large.
_DRAWS = 4
# Layers that are compared, and the weights of them after which there are no more.
_LAYERS, _MOST_LAYERS, _MOST_WEIGHTS = 2, 4, 1 << 26
# The weights of a layer up to which it is copied to float32: 128 MiB then.
_COPIED_WEIGHTS = 1 << 25

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Expected:
    """What some layers of a backbone give in torch's operators.

    Attributes:
        layers: The layers.
        dtype: The precision of the weights.
        states: float32 ``[tokens, hidden]``.
        ids: ``[tokens]``.
        lengths: ``[texts]``.
        types: ``[tokens]`` token types; ``None``: the model has none.
        adapters: ``[texts]`` adapters, -1 for none; ``None``: the model has none.
        keys: ``[texts]`` number of first tokens that are attended to.
        offset: Position of a text's first token.
    """

    layers: tuple[int, ...]
    dtype: torch.dtype
    states: torch.Tensor
    ids: Ints
    lengths: tuple[int, ...]
    types: Ints | None
    adapters: Ints | None
    keys: Ints
    offset: int


def expected_of(backbone: nn.Module, architecture: Architecture, config: Mapping[str, Any]) -> Expected | None:
    """What a packed backbone gives whose linear layers are in torch's own form; ``None`` if that cannot be computed.

    The backbone is not changed, and no model fails to load because of this.
    """
    try:
        return _expected_of(backbone, architecture, config)
    except Exception as error:
        logger.debug("%s is not compared with its native forward", type(backbone).__name__, exc_info=error)
        return None


def excused(found: KernelCheck, expected: Expected, backbone: nn.Module, int8: Int8) -> KernelCheck:
    """A check without its finding if torch in float32, with its numbers rounded as the kernels do, comes no nearer.

    Some weights make a small difference large: scores of attention in the hundreds do. Then a distance from float32
    is that of the precision which the caller chose, and says nothing about kernels.

    Args:
        found: What is wrong.
        expected: What it was compared with.
        backbone: The packed backbone again, with linear layers in torch's own form.
        int8: What the native forward keeps in eight bits.
    """
    if found.similarity is None or (expected.dtype is torch.float32 and int8 == "none"):
        return found
    try:
        rounded = _rounded_similarity(backbone, expected, int8)
    except Exception as error:
        logger.debug("%s cannot be rounded in torch", type(backbone).__name__, exc_info=error)
        return found
    if 1 - found.similarity > _ROUNDINGS * (1 - rounded):
        return found
    reason = f"these weights need more precision: rounding alone, in torch, gives a similarity of {rounded:.4f}"
    return replace(found, similarity=None, obstacle=reason)


def _rounded_similarity(backbone: nn.Module, expected: Expected, int8: Int8) -> float:
    """Of the states that torch gives when each module's result, or what enters a product in eight bits, is rounded."""
    view: Any = _view_of(backbone, expected.layers)
    random = torch.Generator().manual_seed(0)

    def in_eight_bits(_: nn.Module, args: Any) -> Any:
        step = args[0].abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
        return ((args[0] / step).round() * step, *args[1:])

    def in_bfloat16(_: nn.Module, args: Any, out: Any) -> Any:
        if not isinstance(out, torch.Tensor) or not out.is_floating_point():
            return out
        noise = (torch.rand(out.shape, generator=random) - 0.5) / 128  # other numbers in each draw
        return (out.float() * (1 + noise)).to(out.dtype)

    hooks = []
    try:
        if expected.dtype is torch.bfloat16:
            hooks += [module.register_forward_hook(in_bfloat16) for module in view.modules() if module is not view]
        for module in view.layers.modules() if int8 != "none" else ():
            weight = getattr(module, "weight", None)
            if isinstance(weight, torch.Tensor) and weight.dim() == 2:
                hooks.append(module.register_forward_pre_hook(in_eight_bits))
        return min(similarity(_states_of(view, expected), expected.states) for _ in range(_DRAWS))
    finally:
        for hook in hooks:
            hook.remove()


def check(encoder: NativeEncoder, expected: Expected) -> KernelCheck:
    """Compare an encoder with what it must give: all states, and those of one row or the mean of each text."""
    int8 = encoder.plan.kernels.int8
    words = [str(expected.dtype).removeprefix("torch."), f"layers {', '.join(map(str, expected.layers))}"]
    if int8 != "none":
        words.insert(1, "int8" if int8 == "feeds" else "int8-all")
    described: dict[str, Any] = {
        "kernel": f"encoder {library.isa()}",
        "call": ", ".join(words),
        "least": _LEAST[expected.dtype] if int8 == "none" else _LEAST_INT8,
    }
    if not encoder.plan.layers:
        return KernelCheck(**described, obstacle="its plan does not say where its layers begin")
    start = perf_counter()
    try:
        some = NativeEncoder(encoder.plan.of_layers(expected.layers))
        near = _similarity(some, expected)
    except Exception as error:
        logger.debug("the native encoder raised in the self-check", exc_info=error)
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        return KernelCheck(**described, obstacle=reason, raised=True, seconds=perf_counter() - start)
    return KernelCheck(**described, similarity=near, seconds=perf_counter() - start)


_READ: tuple[Rows, ...] = ("first", "last", "mean")


def _similarity(encoder: NativeEncoder, expected: Expected) -> float:
    """Of the states of all texts, and of the rows that one text each has in another reading of the short ones."""
    few = expected.lengths[:2]
    near = [similarity(_encoded(encoder, expected, "all", expected.lengths), expected.states)]
    for rows in _READ:
        states = expected.states[: sum(few)].split(few)
        near.append(similarity(_encoded(encoder, expected, rows, few), torch.stack([_read(s, rows) for s in states])))
    return min(near)


def _encoded(encoder: NativeEncoder, expected: Expected, rows: Rows, lengths: tuple[int, ...]) -> torch.Tensor:
    tokens, texts = sum(lengths), len(lengths)
    return encoder.encode(
        expected.ids[:tokens],
        bounds_of(lengths),
        offset=expected.offset,
        types=None if expected.types is None else expected.types[:tokens],
        keys=expected.keys[:texts],
        adapters=None if expected.adapters is None else expected.adapters[:texts],
        rows=rows,
        threads=1,
    )


def _read(states: torch.Tensor, rows: Rows) -> torch.Tensor:
    if rows == "mean":
        return states.mean(0)
    return states[0 if rows == "first" else -1]


def _expected_of(backbone: nn.Module, architecture: Architecture, config: Mapping[str, Any]) -> Expected | None:
    layers = getattr(backbone, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        return None
    chosen = _chosen(layers)
    offset, capacity = architecture.position_offset(config), architecture.capacity(config)
    longest = max(1, min(max(LENGTHS), max(LENGTHS) if capacity is None else capacity))
    lengths = tuple(min(length, longest) for length in (*LENGTHS, 17))
    keys = np.array([*lengths[:-1], max(1, lengths[-1] // 3)], dtype=np.int32)
    total = sum(lengths)
    ids = token_ids(total, int(config["vocab_size"]))
    types = adapters = None
    if architecture.token_types:
        types = (np.arange(total) % min(2, int(config.get("type_vocab_size") or 1))).astype(np.int32)
    count = getattr(getattr(backbone, "words", None), "copies", 0)  # of adapters
    if architecture.adapters and count:
        adapters = (np.arange(len(lengths)) % (count + 1) - 1).astype(np.int32)
    unknown = Expected(
        layers=chosen,
        dtype=next(backbone.parameters()).dtype,
        states=torch.empty(0),
        ids=ids,
        lengths=lengths,
        types=types,
        adapters=adapters,
        keys=keys,
        offset=offset,
    )
    states = _states_of(_view_of(backbone, chosen), unknown)
    if not states.isfinite().all():
        raise FloatingPointError("the states of random tokens are not finite")
    return replace(unknown, states=states)


def _states_of(view: nn.Module, expected: Expected) -> torch.Tensor:
    """What torch gives for the texts of ``expected``."""
    types, adapters, lengths = expected.types, expected.adapters, expected.lengths
    options = {
        "token_type_ids": None if types is None else _row(types),
        "adapter_ids": None if adapters is None else _row(np.repeat(adapters, lengths)),
    }
    positions = np.concatenate([np.arange(length) + expected.offset for length in lengths])
    token = kernels.STAND_IN.set(sdpa.attend)
    try:
        with torch.inference_mode():
            out = view(
                input_ids=_row(expected.ids),
                position_ids=_row(positions),
                segments=Segments.of(lengths, keys=expected.keys.tolist()),
                **{name: value for name, value in options.items() if value is not None},
            )
    finally:
        kernels.STAND_IN.reset(token)
    states: torch.Tensor = out.last_hidden_state[0].float()
    return states


def _row(values: npt.NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64))[None]


def _chosen(layers: nn.ModuleList) -> tuple[int, ...]:
    """The first layer of each kind, then others up to two, in order, as long as their weights are few."""
    kinds: dict[Any, int] = {}
    for i, layer in enumerate(layers):
        kinds.setdefault(tuple(getattr(layer, name, None) for name in ("kind", "window", "masking")), i)
    first = [*kinds.values()][:_MOST_LAYERS]
    more = [i for i in range(len(layers)) if i not in first][: max(0, _LAYERS - len(first))]
    chosen: list[int] = []
    weights = 0
    for i in (*first, *more):
        weights += _weights_of(layers[i])
        if chosen and weights > _MOST_WEIGHTS:
            break
        chosen.append(i)
    return tuple(sorted(chosen))


def _view_of(backbone: nn.Module, chosen: tuple[int, ...]) -> nn.Module:
    """A backbone with these layers only, in float32 unless they are large.

    Weights that are float32 already are not copied, nor are tables.
    """
    layers: Any = backbone.layers
    some = [layers[i] for i in chosen]
    view = copy.copy(backbone)
    if max(map(_weights_of, some)) > _COPIED_WEIGHTS:
        view._modules = {**backbone._modules, "layers": nn.ModuleList(some)}
        return view
    view._modules = {name: None if part is None else _widened(part) for name, part in backbone._modules.items()}
    view._modules["layers"] = nn.ModuleList(map(_copied, some))
    return view


def _weights_of(layer: nn.Module) -> int:
    return sum(weight.numel() for weight in layer.parameters())


def _widened(part: nn.Module) -> nn.Module:
    if isinstance(part, nn.ModuleList):
        return part  # the layers, which are replaced
    tables = any(isinstance(module, nn.Embedding) or hasattr(module, "copies") for module in part.modules())
    return _Float32Output(part) if tables else _copied(part)


def _copied(part: nn.Module) -> nn.Module:
    numbers = [*part.parameters(), *part.buffers()]
    if all(tensor.dtype is torch.float32 or not tensor.is_floating_point() for tensor in numbers):
        return part
    return copy.deepcopy(part).float()


class _Float32Output(nn.Module):
    """Embeddings, whose tables are too large to be copied, and their result in float32."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, *args: Any, **options: Any) -> torch.Tensor:
        out: torch.Tensor = self.part(*args, **options)
        return out.float()

    def __getattr__(self, name: str) -> Any:
        if name == "part" or name in self.__dict__.get("_modules", {}):
            return super().__getattr__(name)
        return getattr(self.part, name)
