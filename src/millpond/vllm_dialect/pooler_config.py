"""PoolerConfig: what vLLM's ``pooler_config`` says, in its present and its older words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from millpond.errors import InvalidRequestError
from millpond.params import PoolingParams, one_value
from millpond.pooling.activations import activate
from millpond.tasks import Activation
from millpond.vllm_dialect.arguments import POOLING_TASKS

_SEQUENCE = {"CLS": "cls", "LAST": "lasttoken", "MEAN": "mean"}
_TOKEN = ("ALL", "STEP")
_KEYS = (
    "task",
    "pooling_type",
    "seq_pooling_type",
    "tok_pooling_type",
    "use_activation",
    "normalize",
    "softmax",
    "activation",
    "dimensions",
    "enable_chunked_processing",
    "max_embed_len",
    "logit_mean",
    "logit_sigma",
    "logit_bias",
    "logit_scale",
    "step_tag_id",
    "returned_token_ids",
    "enable_flash_late_interaction",
)


@dataclass(frozen=True, kw_only=True)
class PoolerConfig:
    """Defaults for every request of an :class:`~millpond.LLM`.

    Attributes:
        task: The default task of ``encode``.
        pooling: Replaces the checkpoint's pooling.
        use_activation: Normalize vectors, activate logits.
        dimensions: Matryoshka width.
        chunked: Embed over-long texts in windows.
        max_embed_len: Longest text accepted then.
        logit_mean: Subtracted from logits before the activation.
        logit_sigma: Divides them.
        step_tag_id: STEP pooling: the token whose rows are kept.
        returned_token_ids: STEP pooling: the columns that are kept.
    """

    task: str | None = None
    pooling: str | None = None
    use_activation: bool | None = None
    dimensions: int | None = None
    chunked: bool = False
    max_embed_len: int | None = None
    logit_mean: float | None = None
    logit_sigma: float | None = None
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] | None = None

    @classmethod
    def of(cls, config: Any) -> Self:
        """Read a dict, its JSON, or an object with these attributes.

        Raises:
            InvalidRequestError: An unknown key, or a value that makes no sense.
        """
        fields = _as_mapping(config)
        unknown = sorted(fields.keys() - set(_KEYS))
        if unknown:
            raise InvalidRequestError(
                f"pooler_config has {unknown[0]}, which is unknown; it may have {', '.join(_KEYS)}"
            )
        given = {key: value for key, value in fields.items() if value is not None}
        switch = one_value(
            {key: given.get(key) for key in ("use_activation", "normalize", "softmax", "activation")},
            owner="pooler_config's ",
        )
        if given.get("task") not in (None, *POOLING_TASKS):
            raise InvalidRequestError(
                f"pooler_config's task={given['task']!r} is unknown; choose one of {', '.join(POOLING_TASKS)}"
            )
        mean, sigma = _affine(given)
        pooling, tokenwise = _pooling(given)
        tag, columns = _steps(given, tokenwise)
        return cls(
            task=given.get("task"),
            pooling=pooling,
            use_activation=None if switch is None else _a_bool("use_activation", switch),
            dimensions=_a_count("dimensions", given.get("dimensions")),
            chunked=_a_bool("enable_chunked_processing", given.get("enable_chunked_processing", False)),
            max_embed_len=_a_count("max_embed_len", given.get("max_embed_len")),
            logit_mean=mean,
            logit_sigma=sigma,
            step_tag_id=tag,
            returned_token_ids=columns,
        )

    @property
    def calibrated(self) -> bool:
        """Whether logits are shifted or scaled before their activation."""
        return self.logit_mean is not None or self.logit_sigma is not None

    def activate(self, logits: npt.NDArray[np.float32], activation: Activation) -> npt.NDArray[np.float32]:
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
            raise InvalidRequestError(f"pooler_config={config!r} is no JSON: {error}") from error
    if isinstance(config, Mapping):
        return config
    found = {key: getattr(config, key) for key in _KEYS if hasattr(config, key)}
    if not found:
        raise InvalidRequestError(f"pooler_config={config!r} must be a dict or its JSON")
    return found


def _pooling(given: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """(pooling of whole texts, pooling of tokens)."""
    named, whole, each = (given.get(key) for key in ("pooling_type", "seq_pooling_type", "tok_pooling_type"))
    if named is not None and (whole is not None or each is not None):
        raise InvalidRequestError("pooler_config's pooling_type excludes seq_pooling_type and tok_pooling_type")
    if named is not None:
        whole, each = (None, named) if str(named).upper() in _TOKEN else (named, None)
    if whole is not None and str(whole).upper() not in _SEQUENCE:
        raise InvalidRequestError(f"pooling type {whole!r} is unknown; choose {', '.join((*_SEQUENCE, *_TOKEN))}")
    if each is not None and str(each).upper() not in _TOKEN:
        raise InvalidRequestError(f"token pooling type {each!r} is unknown; choose {', '.join(_TOKEN)}")
    return (
        None if whole is None else _SEQUENCE[str(whole).upper()],
        None if each is None else str(each).upper(),
    )


def _steps(given: Mapping[str, Any], tokenwise: str | None) -> tuple[int | None, tuple[int, ...] | None]:
    """(the token whose rows are kept, the columns that are kept)."""
    tag, columns = given.get("step_tag_id"), given.get("returned_token_ids")
    if tokenwise == "ALL" and (tag is not None or columns is not None):
        raise InvalidRequestError("pooler_config's step_tag_id and returned_token_ids are for the pooling type STEP")
    PoolingParams(step_tag_id=tag, returned_token_ids=columns)  # its own errors, at construction
    return tag, None if columns is None else tuple(columns)


def _affine(given: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """(mean, sigma); the older ``logit_bias`` was subtracted, ``logit_scale`` multiplied."""
    mean = _a_number("logit_mean", given.get("logit_mean", given.get("logit_bias")))
    sigma, scale = (_a_number(name, given.get(name)) for name in ("logit_sigma", "logit_scale"))
    if sigma == 0.0 or scale == 0.0:
        raise InvalidRequestError("logit_sigma=0 would divide by zero, and logit_scale=0 says nothing; leave it out")
    return mean, 1.0 / scale if sigma is None and scale is not None else sigma


def _a_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"pooler_config's {name}={value!r} must be true or false")
    return value


def _a_count(name: str, value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise InvalidRequestError(f"pooler_config's {name}={value!r} must be a positive int")
    return value


def _a_number(name: str, value: Any) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise InvalidRequestError(f"pooler_config's {name}={value!r} must be a number")
    return None if value is None else float(value)
