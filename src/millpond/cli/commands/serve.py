"""``millpond serve``: checkpoints over HTTP, for clients of OpenAI, Cohere, TEI and vLLM."""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millpond.cli.arguments.vllm_flags import IGNORED_ARGS
from millpond.errors import MissingExtraError

if TYPE_CHECKING:
    from millpond.server.served.models import ServedModels
    from millpond.server.settings.config import ServerConfig

logger = logging.getLogger(__name__)

_EXTRA = ("fastapi", "fastapi_offline", "orjson", "prometheus_client", "pydantic", "uvicorn", "yaml")

_MODELS = "The models"
_REQUESTS = "Requests"
_NETWORK = "The network"
_LOG = "Log and traces"


def _option(*flags: str, help: str, panel: str, metavar: str | None = None) -> Any:
    return typer.Option(*flags, help=help, rich_help_panel=panel, metavar=metavar)


# All options are str: values of flags, environment and file are converted in one place, with the same errors.
def serve(
    ctx: typer.Context,
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Hub ids, local folders, or names of the file's models.", metavar="MODEL"),
    ] = None,
    *,
    model: Annotated[
        list[str] | None, _option("--model", help="The same as the argument.", panel=_MODELS, metavar="MODEL")
    ] = None,
    config: Annotated[
        str | None,
        _option(
            help="YAML file of these options; under models: each model has its own.", panel=_MODELS, metavar="FILE"
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        _option(
            help="Names of the model for clients, or one for each of several models.", panel=_MODELS, metavar="NAME..."
        ),
    ] = None,
    revision: Annotated[
        str | None, _option(help="Branch, tag or commit of a hub id.", panel=_MODELS, metavar="NAME")
    ] = None,
    runner: Annotated[str | None, _option(help="auto or pooling.", panel=_MODELS)] = None,
    convert: Annotated[str | None, _option(help="auto, embed, classify or none.", panel=_MODELS)] = None,
    task: Annotated[str | None, _option(help="Older name of --convert.", panel=_MODELS)] = None,
    device: Annotated[
        str | None, _option(help="auto, cpu, cuda, mps, or several: cuda:0,cuda:1.", panel=_MODELS)
    ] = None,
    dtype: Annotated[str | None, _option(help="auto, float32, float16 or bfloat16.", panel=_MODELS)] = None,
    quantization: Annotated[str | None, _option("--quantization", help="int8, int8-all or fp8.", panel=_MODELS)] = None,
    max_model_len: Annotated[
        str | None, _option(help="Most tokens per prompt (16k: 16000, 16K: 16384).", panel=_MODELS, metavar="N")
    ] = None,
    hf_overrides: Annotated[
        str | None,
        _option(help="Merged into config.json; also --hf-overrides.KEY VALUE.", panel=_MODELS, metavar="JSON"),
    ] = None,
    pooler_config: Annotated[
        str | None,
        _option(
            "--pooler-config",
            "--override-pooler-config",
            help="vLLM's; also --pooler-config.KEY VALUE.",
            panel=_MODELS,
            metavar="JSON",
        ),
    ] = None,
    chat_template: Annotated[
        str | None,
        _option(help="Jinja file or source, for messages; for a reranker its score template.", panel=_MODELS),
    ] = None,
    score_template: Annotated[
        str | None, _option(help="Jinja file or source, for a reranker's pairs.", panel=_MODELS)
    ] = None,
    trust_remote_code: Annotated[
        bool | None,
        _option(
            "--trust-remote-code/--no-trust-remote-code", help="Accepted; no such code is ever run.", panel=_MODELS
        ),
    ] = None,
    cache: Annotated[str | None, _option(help="File of the vector cache.", panel=_MODELS, metavar="PATH")] = None,
    compile: Annotated[
        bool | None, _option("--compile/--no-compile", help="Compile what gets faster by it.", panel=_MODELS)
    ] = None,
    max_batch_tokens: Annotated[
        str | None,
        _option(
            "--max-batch-tokens",
            "--max-num-batched-tokens",
            help="Most tokens per forward.",
            panel=_MODELS,
            metavar="N",
        ),
    ] = None,
    max_queue: Annotated[
        str | None,
        _option(help="Most texts waiting for a model; further requests get 429 (16384).", panel=_MODELS, metavar="N"),
    ] = None,
    index: Annotated[
        list[str] | None,
        _option(
            help="Late-interaction index to serve at /v1/indexes/NAME; repeat for more.",
            panel=_MODELS,
            metavar="NAME=PATH",
        ),
    ] = None,
    max_inputs: Annotated[
        str | None, _option(help="Most texts in one request (2048).", panel=_REQUESTS, metavar="N")
    ] = None,
    max_body_bytes: Annotated[
        str | None, _option(help="Largest body; larger ones get 413 (32M).", panel=_REQUESTS, metavar="N")
    ] = None,
    request_timeout: Annotated[
        str | None, _option(help="Time until a request is given up with 504 (600).", panel=_REQUESTS, metavar="SECONDS")
    ] = None,
    drain_timeout: Annotated[
        str | None, _option(help="Time for running requests after SIGTERM (30).", panel=_REQUESTS, metavar="SECONDS")
    ] = None,
    trust_request_chat_template: Annotated[
        bool | None,
        _option(
            "--trust-request-chat-template/--no-trust-request-chat-template",
            help="Requests may contain chat templates.",
            panel=_REQUESTS,
        ),
    ] = None,
    host: Annotated[
        str | None, _option(help="Address to listen on (127.0.0.1); 0.0.0.0 for all.", panel=_NETWORK)
    ] = None,
    port: Annotated[
        str | None, _option(help="Port to listen on (8000); 0 for a free one.", panel=_NETWORK, metavar="N")
    ] = None,
    uds: Annotated[str | None, _option(help="Listen on a Unix socket instead.", panel=_NETWORK, metavar="PATH")] = None,
    max_connections: Annotated[
        str | None,
        _option(help="Most open connections; by default as ulimit -n allows.", panel=_NETWORK, metavar="N"),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        _option(
            help="Key that clients must send; repeat for more. Safer: MILLPOND_API_KEY.", panel=_NETWORK, metavar="KEY"
        ),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        _option(help="Origin that browsers may call from; repeat for more.", panel=_NETWORK, metavar="ORIGIN"),
    ] = None,
    root_path: Annotated[
        str | None, _option(help="Path prefix that a proxy strips.", panel=_NETWORK, metavar="PATH")
    ] = None,
    ssl_certfile: Annotated[
        str | None, _option(help="Certificate; enables TLS.", panel=_NETWORK, metavar="PEM")
    ] = None,
    ssl_keyfile: Annotated[str | None, _option(help="Its key.", panel=_NETWORK, metavar="PEM")] = None,
    ssl_ca_certs: Annotated[
        str | None, _option(help="Authorities for the clients' certificates.", panel=_NETWORK, metavar="PEM")
    ] = None,
    log_level: Annotated[
        str | None, _option(help="debug, info, warning or error (info).", panel=_LOG, metavar="LEVEL")
    ] = None,
    log_format: Annotated[str | None, _option(help="plain or json (plain).", panel=_LOG, metavar="FORMAT")] = None,
    otlp_traces_endpoint: Annotated[
        str | None, _option(help="Where to send traces; needs the extra otel.", panel=_LOG, metavar="URL")
    ] = None,
    log_requests: Annotated[
        bool | None,
        _option(
            "--log-requests/--disable-log-requests",
            "--enable-log-requests/--no-enable-log-requests",
            help="A line for each request.",
            panel=_LOG,
        ),
    ] = None,
) -> None:
    """Serve checkpoints over HTTP, each with all its tasks, until SIGTERM or Ctrl-C.

    Options are those of vllm serve. Each is also an environment variable (--max-queue: MILLPOND_MAX_QUEUE) and a key
    of the file; a flag takes precedence over a variable, a variable over the file. vLLM's flags for memory and
    parallelism that have no effect here are accepted and named in a warning.
    """
    if missing := [name for name in _EXTRA if find_spec(name) is None]:
        raise MissingExtraError(f"millpond serve needs {', '.join(missing)}: pip install 'millpond[server]'")

    from millpond.server.settings import sources

    flags = {
        name: value
        for name, value in ctx.params.items()
        if value not in (None, [], ()) and name not in ("models", "model")
    }
    level_source = ctx.parent.get_parameter_source("log_level") if ctx.parent is not None else None
    if level_source is not None and level_source.name == "COMMANDLINE" and ctx.parent is not None:
        flags.setdefault("log_level", ctx.parent.params["log_level"])  # millpond --log-level debug serve
    settings = sources.read(
        [*(models or ()), *(model or ())], flags, os.environ, ignored_args=ctx.meta.get(IGNORED_ARGS)
    )

    from millpond.server.launch import run

    _start_log(settings.server)
    if settings.ignored:
        logger.warning("no meaning here, and ignored: %s", ", ".join(settings.ignored))
    run.serve(settings.models, settings.server, ready=_announce)


def _start_log(config: ServerConfig) -> None:
    from millpond.server.telemetry.logs import Formatter

    handler = logging.StreamHandler()
    handler.setFormatter(Formatter(config.log_format))
    logging.basicConfig(handlers=[handler], force=True)
    logging.getLogger("millpond").setLevel(config.log_level.upper())
    logging.captureWarnings(True)


def _announce(address: str, models: ServedModels) -> None:
    """Print the address and the models when the server is ready."""
    from millpond import __version__

    print(f"serving at {address} (millpond {__version__})")
    for model in models:
        aliases = f" (also {', '.join(model.names[1:])})" if len(model.names) > 1 else ""
        print(f"  {model.name}{aliases}: {', '.join(sorted(model.engine.tasks))}")
    print(f"every route: {address}/docs" if not address.startswith("unix:") else "every route: /docs", flush=True)
