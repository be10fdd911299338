"""EngineConfig: the arguments of an Engine, checked and frozen."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millpond.errors import InvalidRequestError, ModelLoadError
from millpond.tasks import ACTIVATIONS, QUANTIZATIONS, Activation
from millpond.values.params import plain_int

_DTYPES = ("auto", "float32", "float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The arguments of an engine; :class:`millpond.Engine` documents each field."""

    model: str
    revision: str | None = None
    device: str | Sequence[str] = "auto"
    backend: str = "auto"
    dtype: str = "auto"
    max_length: int | None = None
    pooling: str | None = None
    normalize: bool | None = None
    convert: str = "auto"
    hf_overrides: Mapping[str, Any] | None = None
    quantization: str | None = None
    max_batch_tokens: int | None = None
    max_queue: int = 1 << 18
    compile: bool = False
    trust_remote_code: bool = False
    score_template: str | None = None
    activation: Activation | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | os.PathLike) or not os.fspath(self.model):
            raise ModelLoadError(f"model={self.model!r} must be a hub id or a folder")
        devices = self.device
        if isinstance(devices, list | tuple) and devices and all(isinstance(name, str) for name in devices):
            object.__setattr__(self, "device", ",".join(devices))  # the other spelling of several devices
        for name in ("max_length", "max_batch_tokens", "max_queue"):
            object.__setattr__(self, name, plain_int(getattr(self, name)))
        for name, (fits, wanted) in _CHECKS.items():
            if not fits(value := getattr(self, name)):
                raise InvalidRequestError(f"{name}={value!r} {wanted}")
        if self.dtype not in _DTYPES:
            raise ModelLoadError(f"dtype={self.dtype!r} is unknown; choose {', '.join(_DTYPES)}")
        if self.trust_remote_code:
            raise InvalidRequestError(
                "trust_remote_code=True is not available: millpond runs its own and transformers' code only, "
                "and no architecture it supports needs a checkpoint's; leave it out"
            )


def _one_of(*choices: str | None) -> tuple[Callable[[Any], bool], str]:
    *names, last = filter(None, choices)
    way_out = ", or leave it out" if None in choices else ""
    return (
        lambda value: isinstance(value, str | None) and value in choices,
        f"is unknown; choose {', '.join(names)} or {last}{way_out}",
    )


def _is_positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


# By option: whether a value fits, and what is wrong with one that does not.
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "device": (
        lambda value: isinstance(value, str),
        "must be a str like 'cpu', or a list of them like ['cuda:0', 'cuda:1']",
    ),
    "backend": _one_of("auto", "native", "torch"),
    "convert": _one_of("auto", "embed", "classify"),
    "activation": _one_of(None, *ACTIVATIONS),
    "dtype": (lambda value: isinstance(value, str), "must be a str like 'float32'"),
    "revision": (lambda value: isinstance(value, str | None), "must be a str like 'main', or None"),
    "pooling": (lambda value: isinstance(value, str | None), "must be a str like 'mean', or None"),
    "max_length": (lambda value: value is None or _is_positive(value), "must be a positive int, or None"),
    "max_batch_tokens": (lambda value: value is None or _is_positive(value), "must be a positive int, or None"),
    "max_queue": (_is_positive, "must be a positive int"),
    "normalize": (lambda value: isinstance(value, bool | None), "must be True, False or None (as the checkpoint)"),
    "hf_overrides": (lambda value: isinstance(value, Mapping | None), "must be a dict, merged into config.json"),
    "quantization": _one_of(None, *QUANTIZATIONS),
    "compile": (lambda value: isinstance(value, bool), "must be True or False"),
    "score_template": (
        lambda value: isinstance(value, str | None),
        "must be Jinja source, or the path of a .jinja file",
    ),
}
