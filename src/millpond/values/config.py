"""EngineConfig: the arguments of an Engine, checked and frozen."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millpond.errors import InvalidRequestError, ModelLoadError
from millpond.tasks import ACTIVATIONS, QUANTIZATIONS, Activation

# Options that take a name, each with an example.
_NAMES = {"dtype": "float32", "revision": "main", "pooling": "mean"}
_OPTIONAL = frozenset(("revision", "pooling", "max_length", "max_batch_tokens"))


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The arguments of an engine; :class:`millpond.Engine` documents each field."""

    model: str
    revision: str | None = None
    device: str | Sequence[str] = "auto"
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
        self._join_devices()
        if self.convert not in ("auto", "embed", "classify"):
            raise InvalidRequestError(f"convert={self.convert!r} is unknown; choose auto, embed or classify")
        if self.activation is not None and self.activation not in ACTIVATIONS:
            raise InvalidRequestError(f"activation={self.activation!r} is unknown; choose {', '.join(ACTIVATIONS)}")
        for name, example in _NAMES.items():
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name not in _OPTIONAL):
                raise InvalidRequestError(
                    f"{name}={value!r} must be a str like {example!r}" + (", or None" if name in _OPTIONAL else "")
                )
        for name in ("max_length", "max_batch_tokens", "max_queue"):
            self._check_positive(name)
        if not isinstance(self.normalize, bool | None):
            raise InvalidRequestError(f"normalize={self.normalize!r} must be True, False or None (as the checkpoint)")
        if self.hf_overrides is not None and not isinstance(self.hf_overrides, Mapping):
            raise InvalidRequestError(f"hf_overrides={self.hf_overrides!r} must be a dict, merged into config.json")
        if self.quantization not in (None, *QUANTIZATIONS):
            raise InvalidRequestError(
                f"quantization={self.quantization!r} is unknown; choose {' or '.join(QUANTIZATIONS)}, or leave it out"
            )
        if not isinstance(self.compile, bool):
            raise InvalidRequestError(f"compile={self.compile!r} must be True or False")
        if self.score_template is not None and not isinstance(self.score_template, str):
            raise InvalidRequestError(
                f"score_template={self.score_template!r} must be Jinja source, or the path of a .jinja file"
            )
        if self.trust_remote_code:
            raise InvalidRequestError(
                "trust_remote_code=True is not available: millpond runs its own and transformers' code only, "
                "and no architecture it supports needs a checkpoint's; leave it out"
            )

    def _join_devices(self) -> None:
        """Join several devices with commas, which is their other spelling."""
        devices = self.device
        if isinstance(devices, list | tuple) and devices and all(isinstance(name, str) for name in devices):
            object.__setattr__(self, "device", ",".join(devices))
        elif not isinstance(devices, str):
            raise InvalidRequestError(
                f"device={devices!r} must be a str like 'cpu', or a list of them like ['cuda:0', 'cuda:1']"
            )

    def _check_positive(self, name: str) -> None:
        """Refuse anything but a positive int (or numpy's), or ``None`` if the option has a default."""
        value = getattr(self, name)
        if value is None and name in _OPTIONAL:
            return
        try:
            number = 0 if isinstance(value, bool) else operator.index(value)
        except TypeError:
            number = 0
        if number < 1:
            raise InvalidRequestError(
                f"{name}={value!r} must be a positive int" + (", or None" if name in _OPTIONAL else "")
            )
        object.__setattr__(self, name, number)
