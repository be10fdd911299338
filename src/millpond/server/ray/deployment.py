"""The server as a Ray Serve deployment: replicas on a cluster with one address.

From Python::

    from ray import serve
    from millpond.server.settings.config import ModelConfig
    from millpond.server.ray.deployment import deployment
from millpond.server.ray.replicas import Replicas

    replicas = Replicas(autoscaling=Autoscaling(max_replicas=4), num_gpus=1)
    app = deployment([ModelConfig(model="BAAI/bge-base-en-v1.5")], replicas=replicas)
    serve.run(app)

From a shell, with the settings of ``millpond serve`` and those of the replicas::

    serve run millpond.server.ray.deployment:build_app model=BAAI/bge-base-en-v1.5 replicas=2 num_cpus=4
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI

from millpond.errors import InvalidRequestError, MissingExtraError
from millpond.server.app import create_app
from millpond.server.ray import replicas as replica_settings
from millpond.server.ray.replicas import Replicas
from millpond.server.served.models import ServedModels
from millpond.server.settings import sources
from millpond.server.settings.config import ModelConfig, ServerConfig
from millpond.server.telemetry.tracing import check_installed

try:
    from ray import serve
except ImportError as error:
    raise MissingExtraError("a deployment on Ray Serve needs ray: pip install 'millpond[ray]'") from error

# Ray Serve's proxies listen instead of the server; its http_options set the address and the certificate.
_PROXY = ("host", "port", "uds", "max_connections", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
_LISTS = ("served_model_name", "api_key", "allowed_origins", "index")
_ATTEMPTS = 3  # more retries would not load the checkpoint either


class Replica:
    """One copy of the server; it loads the checkpoints where it runs, and receives only their names."""

    def __init__(self, models: Sequence[ModelConfig], config: ServerConfig) -> None:
        check_installed(config.otlp_traces_endpoint)
        self._models = ServedModels.load(models)
        self._config = config

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Ray: the application; its shutdown finishes the queued work."""
        return create_app(self._models, self._config)

    def check_health(self) -> None:
        """Called by Ray: raise if this replica has to be replaced."""
        self._models.check_health()


def deployment(
    models: Sequence[ModelConfig],
    config: ServerConfig | None = None,
    *,
    name: str = "millpond",
    replicas: Replicas | None = None,
) -> serve.Application:
    """A Serve application that answers like ``millpond serve``.

    The address is set in Ray Serve's ``http_options``. When a replica is removed, running requests have
    ``config.drain_timeout`` seconds.
    """
    if not models:
        raise InvalidRequestError("a deployment needs a model; name at least one")
    config, replicas = config or ServerConfig(), replicas or Replicas()
    defaults = {field.name: field.default for field in dataclasses.fields(ServerConfig)}
    _refuse_proxy_settings([key for key in _PROXY if getattr(config, key) != defaults[key]])
    scaling = None if replicas.autoscaling is None else dataclasses.asdict(replicas.autoscaling)
    if scaling is not None:
        scaling["initial_replicas"] = max(1, scaling["min_replicas"])
        for delay in ("upscale_delay", "downscale_delay"):
            scaling[f"{delay}_s"] = scaling.pop(delay)
    try:
        deploy = serve.deployment(
            name=name,
            num_replicas=replicas.replicas if scaling is None else None,
            autoscaling_config=scaling,
            ray_actor_options={"num_cpus": replicas.num_cpus, "num_gpus": replicas.num_gpus},
            max_ongoing_requests=replicas.max_ongoing_requests,
            health_check_period_s=replicas.health_check_period,
            health_check_timeout_s=replicas.health_check_timeout,
            graceful_shutdown_timeout_s=config.drain_timeout,
            max_constructor_retry_count=_ATTEMPTS,
        )
        return deploy(serve.ingress()(Replica)).bind(tuple(models), config)
    except (ValueError, TypeError) as error:
        raise InvalidRequestError(f"{replicas}: Ray Serve refuses this ({error})") from None


def build_app(args: Mapping[str, Any]) -> serve.Application:
    """The application for ``serve run millpond.server.ray.deployment:build_app key=value ...`` and Serve config files.

    ``model`` is one, several separated by commas, or a list. Beside it every setting of ``millpond serve`` but the
    address, ``name``, and the fields of :class:`~millpond.server.ray.replicas.Replicas`. The environment is read as by
    ``millpond serve``, so that an API key need not be on the command line.
    """
    options = {key.replace("-", "_"): value for key, value in args.items()}
    name = str(options.pop("name", "millpond"))
    replica_options = {key: options.pop(key) for key in list(options) if key in replica_settings.SETTINGS}
    models = _split(options.pop("model", ()))
    options = {key: _split(value) if key in _LISTS else value for key, value in options.items()}
    _refuse_proxy_settings([key for key in _PROXY if key in options])
    proxies = {sources.environment_name(key) for key in _PROXY}  # set in images made for a single server
    settings = sources.read(models, options, {key: value for key, value in os.environ.items() if key not in proxies})
    return deployment(settings.models, settings.server, name=name, replicas=replica_settings.read(replica_options))


def _split(value: Any) -> Any:
    """A text from ``serve run`` split at its commas; other values as they are."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _refuse_proxy_settings(keys: Sequence[str]) -> None:
    if keys:
        raise InvalidRequestError(
            f"{', '.join(keys)}: on Ray Serve its proxies listen; leave this out, and set what they have of it in "
            "serve.start(http_options=...) or in the http_options of its config file"
        )
