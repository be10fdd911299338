"""PoolerConfig: vLLM's ``pooler_config``, by its present and its older keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from millpond.errors import InvalidRequestError
from millpond.values.params import PoolingParams
from millpond.vectors.activations import activate
from millpond.vllm.arguments import POOLING_TASKS, one_value

# vLLM's pooling types: of whole texts, by the engine's name, and of tokens.
_SEQUENCE_POOLING = {"CLS": "cls", "LAST": "lasttoken", "MEAN": "mean"}
_TOKEN_POOLING = ("ALL", "STEP")
_ACTIVATIONS = ("use_activation", "normalize", "softmax", "activation")
_STEPS = ("step_tag_id", "returned_token_ids")
_KEYS = (
    *("task", "pooling_type", "seq_pooling_type", "tok_pooling_type", *_ACTIVATIONS, "dimensions", *_STEPS),
    *("enable_chunked_processing", "max_embed_len", "logit_mean", "logit_sigma", "logit_bias", "logit_scale"),
    "enable_flash_late_interaction",
)


@dataclass(frozen=True, kw_only=True)
class PoolerConfig:
    """Defaults for every request of an :class:`~millpond.LLM`."""

    task: str | None = None  # the default task of encode
    pooling: str | None = None  # replaces the checkpoint's pooling
    use_activation: bool | None = None  # normalize vectors, activate logits
    dimensions: int | None = None  # Matryoshka width
    chunked: bool = False  # embed over-long texts in windows
    max_embed_len: int | None = None  # most tokens of a text that is embedded in windows
    logit_mean: float | None = None  # subtracted from logits before the activation
    logit_sigma: float | None = None  # logits are divided by it before the activation
    step_tag_id: int | None = None  # STEP pooling: the token whose rows are kept
    returned_token_ids: tuple[int, ...] | None = None  # STEP pooling: the columns that are kept

    @classmethod
    def of(cls, config: Any) -> Self:
        """Read a dict, its JSON, or an object with these attributes."""
        fields = _as_mapping(config)
        unknown = sorted(fields.keys() - set(_KEYS))
        if unknown:
            raise InvalidRequestError(
                f"pooler_config has {unknown[0]}, which is unknown; it may have {', '.join(_KEYS)}"
            )
        settings = {key: value for key, value in fields.items() if value is not None}
        use_activation = one_value({key: settings.get(key) for key in _ACTIVATIONS}, owner="pooler_config's ")
        if settings.get("task") not in (None, *POOLING_TASKS):
            raise InvalidRequestError(
                f"pooler_config's task={settings['task']!r} is unknown; choose one of {', '.join(POOLING_TASKS)}"
            )
        mean, sigma = _calibration(settings)
        pooling, token_pooling = _pooling(settings)
        tag, columns = _steps(settings, token_pooling)
        return cls(
            task=settings.get("task"),
            pooling=pooling,
            use_activation=_checked({"use_activation": use_activation}, "use_activation", bool, "true or false"),
            dimensions=_count(settings, "dimensions"),
            chunked=_checked(settings, "enable_chunked_processing", bool, "true or false") or False,
            max_embed_len=_count(settings, "max_embed_len"),
            logit_mean=mean,
            logit_sigma=sigma,
            step_tag_id=tag,
            returned_token_ids=columns,
        )

    @property
    def calibrated(self) -> bool:
        """Whether logits are shifted or scaled before their activation."""
        return self.logit_mean is not None or self.logit_sigma is not None

    def activate(self, logits: npt.NDArray[np.float32], activation: str) -> npt.NDArray[np.float32]:
        """``activation((logits - mean) / sigma)``."""
        shifted = (logits - (self.logit_mean or 0.0)) / (1.0 if self.logit_sigma is None else self.logit_sigma)
        return activate(shifted.astype(np.float32), activation)


def _as_mapping(config: Any) -> Mapping[str, Any]:
    if config is None:
        return {}
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except ValueError as error:
            raise InvalidRequestError(f"pooler_config={config!r} is not JSON: {error}") from error
    if isinstance(config, Mapping):
        return config
    fields = {key: getattr(config, key) for key in _KEYS if hasattr(config, key)}
    if not fields:
        raise InvalidRequestError(f"pooler_config={config!r} must be a dict or its JSON")
    return fields


def _pooling(settings: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """(pooling of whole texts, pooling of tokens)."""
    either, sequence, token = (settings.get(key) for key in ("pooling_type", "seq_pooling_type", "tok_pooling_type"))
    if either is not None and (sequence is not None or token is not None):
        raise InvalidRequestError("pooler_config's pooling_type excludes seq_pooling_type and tok_pooling_type")
    if either is not None:
        sequence, token = (None, either) if str(either).upper() in _TOKEN_POOLING else (either, None)
    if sequence is not None and str(sequence).upper() not in _SEQUENCE_POOLING:
        choices = ", ".join((*_SEQUENCE_POOLING, *_TOKEN_POOLING))
        raise InvalidRequestError(f"pooling type {sequence!r} is unknown; choose {choices}")
    if token is not None and str(token).upper() not in _TOKEN_POOLING:
        raise InvalidRequestError(f"token pooling type {token!r} is unknown; choose {', '.join(_TOKEN_POOLING)}")
    return (
        None if sequence is None else _SEQUENCE_POOLING[str(sequence).upper()],
        None if token is None else str(token).upper(),
    )


def _steps(settings: Mapping[str, Any], token_pooling: str | None) -> tuple[int | None, tuple[int, ...] | None]:
    """(the token whose rows are kept, the columns that are kept)."""
    tag, columns = (settings.get(key) for key in _STEPS)
    if token_pooling == "ALL" and (tag is not None or columns is not None):
        raise InvalidRequestError("pooler_config's step_tag_id and returned_token_ids are for the pooling type STEP")
    PoolingParams(step_tag_id=tag, returned_token_ids=columns)  # raises for invalid values
    return tag, None if columns is None else tuple(columns)


def _calibration(settings: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """(mean, sigma); the older ``logit_bias`` is the mean, ``logit_scale`` one over sigma."""
    numbers = [
        _checked(settings, f"logit_{name}", int | float, "a number") for name in ("mean", "bias", "sigma", "scale")
    ]
    mean, bias, sigma, scale = (None if number is None else float(number) for number in numbers)
    mean = bias if mean is None else mean
    if sigma == 0.0 or scale == 0.0:
        raise InvalidRequestError("logit_sigma=0 would divide by zero, and logit_scale=0 says nothing; leave it out")
    return mean, 1.0 / scale if sigma is None and scale is not None else sigma


def _checked(settings: Mapping[str, Any], name: str, kind: Any, what: str) -> Any:
    """The value of a key, if it is a ``kind``; a bool is no number."""
    value = settings.get(name)
    if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
        raise InvalidRequestError(f"pooler_config's {name}={value!r} must be {what}")
    return value


def _count(settings: Mapping[str, Any], name: str) -> int | None:
    value: int | None = _checked(settings, name, int, "a positive int")
    if value is not None and value < 1:
        raise InvalidRequestError(f"pooler_config's {name}={value!r} must be a positive int")
    return value
