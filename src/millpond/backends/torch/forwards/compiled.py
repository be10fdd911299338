"""``compile=True``: the parts of a layer around attention, through torch.compile.

Never a whole model: attention loops over the lengths of a batch, which a compiler would treat as constants. A part is
compiled at load, once for all layers and any number of tokens; one that cannot be compiled runs as written.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from types import FunctionType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from millpond.backends.torch.attention.segments import Segments
from millpond.backends.torch.forwards.int8 import Int8Linear
from millpond.backends.torch.forwards.linear import ReorderedLinear
from millpond.checkpoints.architecture import Architecture
from millpond.errors import ModelLoadError
from millpond.support.cache_folder import cache_folder

logger = logging.getLogger(__name__)

# Fewer rows run as written: on a CPU, entering compiled code costs more than it saves, and a single row would be
# compiled separately.
_LEAST = {"cpu": 256}
_FOLDER = "TORCHINDUCTOR_CACHE_DIR"  # torch's name for it
_WARM_LENGTH = 8


def check_compiler(device: torch.device) -> None:
    """Refuse ``compile=True`` on a machine that cannot compile, before any weight is read."""
    if device.type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise ModelLoadError(
                "compile=True on a CPU needs a C++ compiler, and none was found; install g++ or clang++, name one in "
                "the environment variable CXX, or leave compile out"
            ) from error
    elif device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise ModelLoadError("compile=True on a GPU needs Triton, which is missing here; leave compile out")
    else:
        raise ModelLoadError(f"compile=True is not available on {device.type}; leave it out, or use cuda or cpu")


def compile_parts(backbone: nn.Module, architecture: Architecture, *, offset: int) -> nn.Module:
    """Compile the parts that the modules of ``backbone`` name, in place, and run them once so that no caller waits.

    A module names its parts in ``compiled_parts``: methods of ``rows [tokens, ...]`` and further tensors with as many
    rows.
    """
    device = next(tensor.device for tensor in (*backbone.parameters(), *backbone.buffers()))
    least = _LEAST.get(device.type, 2)
    parts = _replace(backbone, least=least)
    if not parts:
        logger.warning("compile=True changes nothing here: this model has no part that would run faster on %s", device)
        return backbone
    folder = _use_folder()
    started = time.perf_counter()
    for part in parts:
        part.warming = True
    for texts in (1 + least // _WARM_LENGTH, 3 + least // 4):  # two sizes; the second reuses the first one's code
        _run(backbone, architecture, texts, device=device, offset=offset)
    for part in parts:
        part.warming = False
    logger.info("compile=True: %d parts in %.1f s, kept in %s", len(parts), time.perf_counter() - started, folder)
    return backbone


class CompiledPart:
    """A method of a class, compiled once for all modules of that class in a backbone."""

    def __init__(self, method: FunctionType, *, least: int) -> None:
        self._written: Callable[..., Any] = method
        # torch keeps compiled code, a few versions at most, with the code object: each engine gets a copy of it.
        copy = FunctionType(method.__code__.replace(), method.__globals__, method.__name__, method.__defaults__)
        self._compiled = torch.compile(
            copy, fullgraph=True, options={"guard_filter_fn": _ignore_threads, "cpp.dynamic_threads": True}
        )
        self._least = least
        self.failed = False
        self.warming = False

    def __call__(self, module: nn.Module, rows: torch.Tensor, *others: torch.Tensor | None) -> Any:
        """The method's result; ``others`` have as many rows as ``rows``, or are not there."""
        if self.failed or len(rows) < self._least:
            return self._written(module, rows, *others)
        if self.warming:
            for tensor in (rows, *others):
                if tensor is not None:
                    torch._dynamo.maybe_mark_dynamic(tensor, 0)
        try:
            return self._compiled(module, rows, *others)
        except (torch._dynamo.exc.TorchDynamoException, OSError) as error:  # raised before anything has run
            self.failed = True
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            name = self._written.__qualname__
            logger.warning("compile=True: %s runs as written, since it could not be compiled: %s", name, reason)
            return self._written(module, rows, *others)


class OpaqueLinear(nn.Module):
    """A linear layer that the compiler calls without looking inside: only oneDNN knows the order of its weights."""

    handle: torch.Tensor

    def __init__(self, layer: ReorderedLinear | Int8Linear, out: int) -> None:
        super().__init__()
        self.layer = layer
        self.out = out
        # A tensor, not a number: the compiler would treat a number as a constant and compile each layer separately.
        number = next(_HANDLES)
        _LAYERS[number] = layer
        self.register_buffer("handle", torch.tensor(number), persistent=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:  # [tokens, in] -> [tokens, out]
        """Multiply, add, activate."""
        if not torch.compiler.is_compiling():
            return self.layer(rows)  # type: ignore[no-any-return]
        return torch.ops.millpond.opaque_linear(rows, self.handle, self.out)  # type: ignore[no-any-return]


_LAYERS: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()  # by handle, as long as their engine holds them
_HANDLES = count()
_LIBRARY = torch.library.Library("millpond", "DEF")  # the operator is removed when this object is collected
_LIBRARY.define("opaque_linear(Tensor rows, Tensor handle, int out) -> Tensor")
_LIBRARY.impl("opaque_linear", lambda rows, handle, out: _LAYERS[int(handle)](rows), "CPU")
torch.library.register_fake(
    "millpond::opaque_linear", lambda rows, handle, out: rows.new_empty(*rows.shape[:-1], out), lib=_LIBRARY
)


def _replace(backbone: nn.Module, *, least: int) -> list[CompiledPart]:
    """Replace the methods that the modules name by compiled parts, which all modules of a class share."""
    parts: dict[tuple[type, str], CompiledPart] = {}
    for module in list(backbone.modules()):
        names: tuple[str, ...] = getattr(module, "compiled_parts", ())
        for name in names:
            method = getattr(type(module), name)
            part = parts.setdefault((type(module), name), CompiledPart(method, least=least))
            setattr(module, name, partial(part, module))
        for parent in list(module.modules()) if names else ():
            for name, layer in list(parent.named_children()):
                if isinstance(layer, ReorderedLinear | Int8Linear):
                    setattr(parent, name, OpaqueLinear(layer, layer.out_features))
    return list(parts.values())


def _run(backbone: nn.Module, architecture: Architecture, texts: int, *, device: torch.device, offset: int) -> None:
    """Run a batch of short texts, all of token 0."""
    tokens = texts * _WARM_LENGTH
    ids = torch.zeros(1, tokens, dtype=torch.long, device=device)
    positions = (torch.arange(tokens, device=device) % _WARM_LENGTH + offset)[None]  # [1, tokens]
    options: dict[str, Any] = {"use_cache": False} if architecture.decoder else {}
    if architecture.token_types:
        options["token_type_ids"] = ids
    with torch.inference_mode():
        backbone(input_ids=ids, position_ids=positions, segments=Segments.of([_WARM_LENGTH] * texts, device), **options)


def _ignore_threads(guards: Sequence[Any]) -> list[bool]:
    """Use the same code for any number of threads: an engine chooses it for each batch, and torch would recompile."""
    return [guard.guard_type != "GLOBAL_STATE" for guard in guards]


def _use_folder() -> str:
    """The folder of compiled code: the one in torch's variable, else one in the user's cache, closed to other users.

    Files in it are executed, so a folder that others may write to is not used.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    chosen = os.environ.get(_FOLDER)
    if chosen and chosen != default_cache_dir():  # torch writes its default into the variable, too
        return chosen
    folder = cache_folder() / "compile"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)  # fails unless this user owns it
    except OSError as error:
        logger.warning("compile=True: %s cannot be used (%s); torch keeps the code in its own folder", folder, error)
        return "torch's folder"
    os.environ[_FOLDER] = str(folder)
    return str(folder)
