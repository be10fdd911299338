"""Config: the configuration of a server and of its models, valid from construction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from millpond.errors import InvalidRequestError
from millpond.vllm import arguments

LogFormat = Literal["plain", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
Protocol = Literal["default", "weaviate"]

_DTYPES = ("auto", "float32", "float16", "bfloat16")  # checked by the engine too, but after other models are loaded


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One model of a server, with options of the engine and of vLLM.

    Attributes:
        model: Hub id or local folder.
        names: Names that clients use; by default ``model``.
        revision: Branch, tag or commit of a hub id.
        runner: ``auto`` or ``pooling``.
        convert: ``auto``, ``embed``, ``classify`` or ``none``.
        task: Older name of ``convert``, and the default task of ``/pooling``.
        device: As :class:`millpond.Engine`.
        dtype: As :class:`millpond.Engine`; also ``half`` and ``float``.
        max_model_len: Most tokens per prompt.
        hf_overrides: Merged into config.json.
        pooler_config: A dict or its JSON.
        chat_template: Jinja source or file that replaces the tokenizer's own. As in vLLM, one that renders a query and
            a document is a reranker's score template.
        score_template: Jinja source or file for a reranker's pairs.
        trust_remote_code: Accepted; code from checkpoints is never run.
        quantization: As :class:`millpond.Engine`.
        cache: File of the vector cache.
        compile: As :class:`millpond.Engine`.
        max_batch_tokens: As :class:`millpond.Engine`.
        max_queue: Most texts waiting for this model; further requests get 429.

    Raises:
        InvalidRequestError: An invalid option.
    """

    model: str
    names: tuple[str, ...] = ()
    revision: str | None = None
    runner: str = "auto"
    convert: str = "auto"
    task: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    hf_overrides: Mapping[str, Any] | None = None
    pooler_config: Mapping[str, Any] | str | None = None
    chat_template: str | None = None
    score_template: str | None = None
    trust_remote_code: bool = False
    quantization: str | None = None
    cache: Path | None = None
    compile: bool = False
    max_batch_tokens: int | None = None
    max_queue: int = 16384

    def __post_init__(self) -> None:
        if not self.model or not all(self.names):
            raise InvalidRequestError(f"model={self.model!r} or one of its names is empty; name a hub id or a folder")
        arguments.check_flags(runner=self.runner, trust_remote_code=self.trust_remote_code)
        arguments.conversion(self.convert, self.task)
        if arguments.dtype(self.dtype) not in _DTYPES:
            raise InvalidRequestError(f"dtype={self.dtype!r} is unknown; choose {', '.join(_DTYPES)}, half or float")
        for name in ("max_model_len", "max_batch_tokens", "max_queue"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidRequestError(f"{name}={value} must be 1 or more")

    @property
    def served_names(self) -> tuple[str, ...]:
        """The names that clients use."""
        return self.names or (self.model,)


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Options of the server itself.

    Attributes:
        protocol: ``default``: the routes of OpenAI, Cohere, TEI, vLLM and Ollama; ``weaviate``: those of Weaviate's
            t2v-transformers and reranker-transformers containers, whose ``/rerank`` has another answer.
        indexes: Late-interaction indexes to serve, each as ``NAME=PATH``.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        uds: Unix socket to listen on instead of host and port.
        api_keys: A request needs one of these keys; empty: no key is needed.
        root_path: Path prefix that a proxy strips.
        max_body_bytes: Largest request body; larger ones get 413.
        max_response_bytes: Largest response; a request for a larger one gets 400 before its work. The results of all
            requests in progress may take four times as much memory.
        max_inputs: Most texts in one request.
        max_connections: Most open connections; by default as many as the limit of open files leaves room for.
        request_timeout: Seconds after which a request is given up (504).
        drain_timeout: Seconds that running requests have after SIGTERM.
        cors_origins: Origins that browsers may call from; none by default.
        trust_request_chat_template: Whether requests may contain chat templates.
        log_requests: Whether to log a line for each request.
        log_format: ``plain``, or ``json``: one object per line.
        log_level: Lowest level that is logged: ``debug``, ``info``, ``warning`` or ``error``.
        otlp_traces_endpoint: URL for OpenTelemetry's spans; by default from OpenTelemetry's own variables, and if those
            are unset no spans are sent.
        ssl_certfile: PEM file of the certificate; enables TLS.
        ssl_keyfile: PEM file of its key, unless it is in the certificate's file.
        ssl_ca_certs: PEM file of authorities; clients must present a certificate signed by one of them.

    Raises:
        InvalidRequestError: An invalid option.
    """

    protocol: Protocol = "default"
    indexes: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    root_path: str = ""
    max_body_bytes: int = 32 << 20
    max_response_bytes: int = 256 << 20
    max_inputs: int = 2048
    max_connections: int | None = None
    request_timeout: float = 600.0
    drain_timeout: float = 30.0
    cors_origins: tuple[str, ...] = ()
    trust_request_chat_template: bool = False
    log_requests: bool = True
    log_format: LogFormat = "plain"
    log_level: LogLevel = "info"
    otlp_traces_endpoint: str | None = None
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    ssl_ca_certs: Path | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise InvalidRequestError(f"port={self.port} must be 0 (any free one) to 65535")
        if not all(self.api_keys):
            raise InvalidRequestError("api_key is empty, which would open the server; give one, or leave it out")
        if self.root_path and not self.root_path.startswith("/"):
            raise InvalidRequestError(f"root_path={self.root_path!r} must begin with /")
        least = {
            "max_body_bytes": 1,
            "max_response_bytes": 1,
            "max_inputs": 1,
            "max_connections": 1,
            "drain_timeout": 0,
        }
        for name, limit in least.items():
            value = getattr(self, name)
            if value is not None and not limit <= value < math.inf:
                raise InvalidRequestError(f"{name}={value} must be {limit} or more")
        if not 0 < self.request_timeout < math.inf:
            raise InvalidRequestError(f"request_timeout={self.request_timeout} must be a number of seconds, above 0")
        for name, kind in (("protocol", Protocol), ("log_format", LogFormat), ("log_level", LogLevel)):
            choices = get_args(kind)
            if getattr(self, name) not in choices:
                raise InvalidRequestError(f"{name}={getattr(self, name)!r} is unknown; choose {', '.join(choices)}")
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise InvalidRequestError(
                f"otlp_traces_endpoint={endpoint!r} must be a URL of OTLP over HTTP, such as "
                "http://localhost:4318/v1/traces; gRPC, which collectors have at port 4317, is not spoken"
            )
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            raise InvalidRequestError("ssl_keyfile and ssl_ca_certs are for TLS, which needs an ssl_certfile too")
