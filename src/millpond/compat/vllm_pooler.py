"""PoolerConfig: what vLLM's ``pooler_config`` says, in its present and its older words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from millpond.errors import InvalidRequestError
from millpond.params import PoolingParams
from millpond.pooling.activations import activate
from millpond.tasks import Activation

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
        step: STEP pooling: rows of ``step_tag_id``, columns ``returned_token_ids``.
        use_activation: Normalize vectors, activate logits.
        dimensions: Matryoshka width.
        chunked: Embed over-long texts in windows.
        max_embed_len: Longest text accepted then.
        logit_mean: Subtracted from logits before the activation.
        logit_sigma: Divides them.
        step_tag_id: Token whose rows are kept.
        returned_token_ids: Columns that are kept.
    """

    task: str | None = None
    pooling: str | None = None
    step: bool = False
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
            raise InvalidRequestError(f"pooler_config has {unknown[0]}, which is unknown; it may have {_KEYS}")
        given = {key: value for key, value in fields.items() if value is not None}
        switches = [given[key] for key in ("use_activation", "normalize", "softmax", "activation") if key in given]
        if len(set(switches)) > 1:
            raise InvalidRequestError(
                "pooler_config's use_activation, normalize, softmax and activation are one thing, and contradict"
            )
        mean, sigma = _affine(given)
        step_ids = given.get("returned_token_ids")
        pooling, tokenwise = _pooling(given)
        return cls(
            task=given.get("task"),
            pooling=pooling,
            step=tokenwise == "STEP",
            use_activation=switches[0] if switches else None,
            dimensions=given.get("dimensions"),
            chunked=bool(given.get("enable_chunked_processing", False)),
            max_embed_len=given.get("max_embed_len"),
            logit_mean=mean,
            logit_sigma=sigma,
            step_tag_id=given.get("step_tag_id"),
            returned_token_ids=None if step_ids is None else tuple(step_ids),
        )

    @property
    def calibrated(self) -> bool:
        """Whether logits are shifted or scaled before their activation."""
        return self.logit_mean is not None or self.logit_sigma is not None

    def activate(self, logits: npt.NDArray[np.float32], activation: Activation) -> npt.NDArray[np.float32]:
        """``activation((logits - mean) / sigma)``."""
        shifted = (logits - (self.logit_mean or 0.0)) / (1.0 if self.logit_sigma is None else self.logit_sigma)
        return activate(shifted.astype(np.float32), activation)

    def steps(self, params: PoolingParams) -> dict[str, Any]:
        """The step options of a request, the configured ones where it has none."""
        tag, columns = params.step_tag_id, params.returned_token_ids
        return {
            "step_tag_id": self.step_tag_id if tag is None else tag,
            "returned_token_ids": self.returned_token_ids if columns is None else columns,
        }


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


def _affine(given: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """(mean, sigma); the older ``logit_bias`` was subtracted, ``logit_scale`` multiplied."""
    mean, sigma = given.get("logit_mean", given.get("logit_bias")), given.get("logit_sigma")
    if sigma is None and "logit_scale" in given:
        scale = float(given["logit_scale"])
        sigma = 1.0 / scale if scale else 0.0
    if sigma is not None and float(sigma) == 0.0:
        raise InvalidRequestError("logit_sigma=0 would divide by zero; leave it out")
    return (None if mean is None else float(mean)), (None if sigma is None else float(sigma))
