"""``millpond serve``: checkpoints over HTTP, for clients of OpenAI, Cohere, TEI, vLLM and Ollama."""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millpond.cli.arguments.serve_options import takes_options
from millpond.cli.arguments.vllm_flags import IGNORED_ARGS, UNLISTED
from millpond.errors import MissingExtraError

if TYPE_CHECKING:
    from millpond.server.served.models import ServedModels
    from millpond.server.settings.config import ServerConfig

logger = logging.getLogger(__name__)

_EXTRA = ("fastapi", "fastapi_offline", "orjson", "prometheus_client", "pydantic", "uvicorn", "yaml")


@takes_options
def serve(
    ctx: typer.Context,
    models: Annotated[
        list[str] | None, typer.Argument(help="Hub ids, local folders, or names of the file's models.", metavar="MODEL")
    ] = None,
    **flags: Any,
) -> None:
    """Serve checkpoints over HTTP, each with all its tasks, until SIGTERM or Ctrl-C.

    Options are those of vllm serve. Each is also an environment variable (--max-queue: MILLPOND_MAX_QUEUE) and a key
    of the file; a flag takes precedence over a variable, a variable over the file. vLLM's flags for memory and
    parallelism that have no effect here are accepted and named in a warning.
    """
    if missing := [name for name in _EXTRA if find_spec(name) is None]:
        raise MissingExtraError(f"millpond serve needs {', '.join(missing)}: pip install 'millpond[server]'")

    from millpond.server.settings import sources

    given = ctx.meta[UNLISTED] | {name: value for name, value in flags.items() if value not in (None, [], ())}
    level_source = ctx.parent.get_parameter_source("log_level") if ctx.parent is not None else None
    if level_source is not None and level_source.name == "COMMANDLINE" and ctx.parent is not None:
        given.setdefault("log_level", ctx.parent.params["log_level"])  # millpond --log-level debug serve
    settings = sources.read(models or (), given, os.environ, ignored_args=ctx.meta[IGNORED_ARGS])

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
