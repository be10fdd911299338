"""Replicas: the number of copies of the server on a Ray cluster, and their resources."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from millpond.errors import InvalidRequestError


@dataclass(frozen=True, kw_only=True)
class Autoscaling:
    """How the number of replicas follows the load; Ray checks the numbers."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    min_replicas: int = 1  # 0 stops all of them while there are no requests
    max_replicas: int
    # In progress per replica; a replica batches across its requests, so a few dozen short ones are fine.
    target_ongoing_requests: float = 32
    upscale_delay: float = 30  # seconds of high load before replicas are added
    downscale_delay: float = 600  # seconds of low load before replicas are removed


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """The copies of the server; Ray checks the numbers."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    replicas: int = 1  # without autoscaling
    autoscaling: Autoscaling | None = None  # None: their number is fixed
    num_cpus: float = 1  # CPU cores that the cluster reserves for each replica, which computes with as many threads
    num_gpus: float = 0  # GPUs of each replica, which sees no others; fractions such as 0.5 let replicas share one
    max_ongoing_requests: int = 256  # most requests in a replica at once; others wait in the proxy
    health_check_period: float = 10  # seconds between two health checks of a replica
    health_check_timeout: float = 30  # seconds after which a health check without an answer has failed

    def __post_init__(self) -> None:
        scaling = self.autoscaling
        if scaling is not None and self.replicas != 1:
            raise InvalidRequestError(
                f"replicas={self.replicas} contradicts autoscaling; give min_replicas and max_replicas alone"
            )
        if scaling is not None and scaling.target_ongoing_requests > self.max_ongoing_requests:
            raise InvalidRequestError(
                f"target_ongoing_requests={scaling.target_ongoing_requests:g} is more than "
                f"max_ongoing_requests={self.max_ongoing_requests}, so that no load would ever add a replica; lower "
                "the one or raise the other"
            )


SETTINGS = frozenset(field.name for field in dataclasses.fields(Replicas))


def read(values: Mapping[str, Any]) -> Replicas:
    """The replicas from a command line or a file: numbers may be text, and ``autoscaling`` JSON."""
    options = dict(values)
    try:
        if isinstance(options.get("autoscaling"), str):
            options["autoscaling"] = json.loads(options["autoscaling"])
        return TypeAdapter(Replicas).validate_python(options)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        message = f"{name}={first['input']!r}: {first['msg']}" if name else str(first["ctx"]["error"])
        raise InvalidRequestError(message) from None
    except ValueError as error:
        raise InvalidRequestError(f"autoscaling={options['autoscaling']!r} is not JSON ({error})") from None
