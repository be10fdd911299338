"""Options of ``millpond serve``, as a table; the server's settings have the same names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

Function = TypeVar("Function", bound=Callable[..., Any])

# By heading: the name of the setting, a sentence, what its value is called, and its type, if that is no text: texts are
# converted where those of variables and files are.
_OPTIONS: dict[str, tuple[tuple[Any, ...], ...]] = {
    "The models": (
        ("config", "YAML file of these options; under models: each model has its own.", "FILE"),
        (
            "served_model_name",
            "Names of the model for clients, or one for each of several models.",
            "NAME...",
            list[str],
        ),
        ("revision", "Branch, tag or commit of a hub id.", "NAME"),
        ("convert", "auto, embed, classify or none."),
        ("device", "auto, cpu, cuda, mps, or several: cuda:0,cuda:1."),
        ("dtype", "auto, float32, float16 or bfloat16."),
        ("quantization", "int8, int8-all, auto or fp8."),
        ("max_model_len", "Most tokens per prompt (16k: 16000, 16K: 16384).", "N"),
        ("hf_overrides", "Merged into config.json; also --hf-overrides.KEY VALUE.", "JSON"),
        ("pooler_config", "vLLM's; also --pooler-config.KEY VALUE.", "JSON"),
        ("chat_template", "Jinja file or source, for messages; for a reranker its score template."),
        ("score_template", "Jinja file or source, for a reranker's pairs."),
        ("cache", "Vector cache file to read and fill; created if missing.", "PATH"),
        ("compile", "Compile what gets faster by it.", None, bool),
        ("max_batch_tokens", "Most tokens per forward.", "N"),
        ("max_queue", "Most texts waiting for a model; further requests get 429 (16384).", "N"),
        ("index", "Late-interaction index to serve at /v1/indexes/NAME; repeat for more.", "NAME=PATH", list[str]),
    ),
    "Requests": (
        ("protocol", "default, or weaviate for its t2v and reranker containers' routes.", "NAME"),
        ("max_inputs", "Most texts in one request (2048).", "N"),
        ("max_body_bytes", "Largest body; larger ones get 413 (32M).", "N"),
        ("max_response_bytes", "Largest response; requests for larger ones get 400 (256M).", "N"),
        ("request_timeout", "Time until a request is given up with 504 (600).", "SECONDS"),
        ("drain_timeout", "Time for running requests after SIGTERM (30).", "SECONDS"),
        ("trust_request_chat_template", "Requests may contain chat templates.", None, bool),
    ),
    "The network": (
        ("host", "Address to listen on (127.0.0.1); 0.0.0.0 for all."),
        ("port", "Port to listen on (8000); 0 for a free one.", "N"),
        ("uds", "Listen on a Unix socket instead.", "PATH"),
        ("max_connections", "Most open connections; by default as ulimit -n allows.", "N"),
        ("api_key", "Key that clients must send; repeat for more. Safer: MILLPOND_API_KEY.", "KEY", list[str]),
        ("allowed_origins", "Origin that browsers may call from; repeat for more.", "ORIGIN", list[str]),
        ("root_path", "Path prefix that a proxy strips.", "PATH"),
        ("ssl_certfile", "Certificate; enables TLS.", "PEM"),
        ("ssl_keyfile", "Its key.", "PEM"),
        ("ssl_ca_certs", "Authorities for the clients' certificates.", "PEM"),
    ),
    "Log and traces": (
        ("log_level", "debug, info, warning or error (info).", "LEVEL"),
        ("log_format", "plain or json (plain).", "FORMAT"),
        ("otlp_traces_endpoint", "Where to send traces; needs the extra otel.", "URL"),
        ("log_requests", "A line for each request.", None, bool),
    ),
}
_NEGATIONS = {"log_requests": "--disable-log-requests"}  # vLLM's name


def takes_options(function: Function) -> Function:
    """Let typer see the options of the table in place of ``function``'s ``**flags``."""
    signature = inspect.signature(function, eval_str=True)
    kept = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    added = []
    for panel, rows in _OPTIONS.items():
        for name, words, *more in rows:
            metavar, kind = more[0] if more else None, more[1] if len(more) > 1 else str
            flag = f"--{name.replace('_', '-')}"
            if kind is bool:
                flag += f"/{_NEGATIONS.get(name, f'--no-{flag[2:]}')}"
            option = typer.Option(flag, help=words, rich_help_panel=panel, metavar=metavar)
            parameter = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
            added.append(parameter.replace(annotation=Annotated[kind | None, option]))
    function.__signature__ = signature.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]
    function.__annotations__ |= {each.name: each.annotation for each in added}
    return function
