"""Replicas: the number of copies of the server on a Ray cluster, and their resources."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from millpond.errors import InvalidRequestError
from millpond.server.settings.values import RawValue


@dataclass(frozen=True, kw_only=True)
class Autoscaling:
    """How the number of replicas follows the load.

    Attributes:
        min_replicas: Fewest replicas; 0 stops all of them while there are no requests.
        max_replicas: Most replicas.
        target_ongoing_requests: Target of requests in progress per replica; above it replicas are added. A replica
            batches across its requests, so a few dozen short ones are fine.
        upscale_delay: Seconds of high load before replicas are added.
        downscale_delay: Seconds of low load before replicas are removed.

    Raises:
        InvalidRequestError: Invalid numbers, alone or together.
    """

    min_replicas: int = 1
    max_replicas: int
    target_ongoing_requests: float = 32
    upscale_delay: float = 30
    downscale_delay: float = 600

    def __post_init__(self) -> None:
        _check(self, min_replicas=0, max_replicas=1, upscale_delay=0, downscale_delay=0)
        _check_positive(self, "target_ongoing_requests")
        if self.min_replicas > self.max_replicas:
            raise InvalidRequestError(f"min_replicas={self.min_replicas} is more than max_replicas={self.max_replicas}")


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """The copies of the server.

    Attributes:
        replicas: Number of replicas; set by ``autoscaling`` if that is given.
        autoscaling: How the number follows the load; ``None``: it is fixed.
        num_cpus: CPU cores that the cluster reserves for each replica, which computes with as many threads.
        num_gpus: GPUs of each replica, which sees no others; fractions such as 0.5 let replicas share one.
        max_ongoing_requests: Most requests in a replica at once; others wait in the proxy.
        health_check_period: Seconds between two health checks of a replica.
        health_check_timeout: Seconds after which a health check without an answer has failed.

    Raises:
        InvalidRequestError: Invalid numbers, alone or together.
    """

    replicas: int = 1
    autoscaling: Autoscaling | None = None
    num_cpus: float = 1
    num_gpus: float = 0
    max_ongoing_requests: int = 256
    health_check_period: float = 10
    health_check_timeout: float = 30

    def __post_init__(self) -> None:
        _check(self, replicas=1, num_cpus=0, num_gpus=0, max_ongoing_requests=1)
        _check_positive(self, "health_check_period", "health_check_timeout")
        scaling = self.autoscaling
        if scaling is None:
            return
        if self.replicas != 1:
            raise InvalidRequestError(
                f"replicas={self.replicas} contradicts autoscaling; give min_replicas and max_replicas alone"
            )
        if scaling.target_ongoing_requests > self.max_ongoing_requests:
            raise InvalidRequestError(
                f"target_ongoing_requests={scaling.target_ongoing_requests:g} is more than "
                f"max_ongoing_requests={self.max_ongoing_requests}, so that no load would ever add a replica; lower "
                "the one or raise the other"
            )


SETTINGS = frozenset(field.name for field in dataclasses.fields(Replicas))


def read(values: Mapping[str, Any]) -> Replicas:
    """The replicas from a command line or a file: numbers may be text, and ``autoscaling`` JSON.

    Args:
        values: By field name; ``SETTINGS`` lists the names.

    Raises:
        InvalidRequestError: A value that cannot be converted, or is invalid.
    """
    options = dict(values)
    autoscaling = options.pop("autoscaling", None)
    numbers = _numbers(Replicas, options, "")
    if autoscaling is None:
        return Replicas(**numbers)
    scaling = RawValue(label="autoscaling", value=autoscaling).read(Mapping[str, Any] | None)
    if "max_replicas" not in scaling:
        raise InvalidRequestError('autoscaling needs max_replicas, as {"min_replicas": 1, "max_replicas": 4}')
    return Replicas(**numbers, autoscaling=Autoscaling(**_numbers(Autoscaling, scaling, "autoscaling: ")))


def _numbers(kind: type, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``values`` converted to the number types of the fields of ``kind``."""
    types = {name: hint for name, hint in get_type_hints(kind).items() if hint in (int, float)}
    if unknown := next((name for name in values if name not in types), None):
        raise InvalidRequestError(f"{where}{unknown} is no setting of replicas; there are {', '.join(types)}")
    return {name: RawValue(label=f"{where}{name}", value=value).read(types[name]) for name, value in values.items()}


def _check(config: Any, **minimums: float) -> None:
    """Check that every number has its field's type and is large enough."""
    int_fields = {field.name for field in dataclasses.fields(config) if field.type == "int"}
    for name, limit in minimums.items():
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int if name in int_fields else int | float):
            raise InvalidRequestError(f"{name}={value!r} must be {'a whole' if name in int_fields else 'a'} number")
        if not limit <= value < math.inf:
            raise InvalidRequestError(f"{name}={value} must be {limit} or more")


def _check_positive(config: Any, *names: str) -> None:
    _check(config, **dict.fromkeys(names, 0))
    for name in names:
        if getattr(config, name) <= 0:
            raise InvalidRequestError(f"{name}={getattr(config, name)} must be above 0")
