"""Options of ``millpond serve``, as a table; the server's settings have the same names."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import typer

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class ServeOption:
    """One option; its value is a text, which is converted where those of variables and files are."""

    name: str  # of the setting
    panel: str  # its heading in the help
    help: str  # A sentence; empty: the option is accepted and not listed, as vLLM's other names are
    kind: Any = str  # its type
    metavar: str | None = None  # what its value is called
    flags: tuple[str, ...] = ()  # its names, if they are more than --name

    @property
    def annotation(self) -> Any:
        """What typer reads."""
        switch = f"--{self.name}/--no-{self.name}".replace("_", "-")
        flags = self.flags or ((switch,) if self.kind is bool else (f"--{self.name.replace('_', '-')}",))
        option = typer.Option(
            *flags, help=self.help, rich_help_panel=self.panel, metavar=self.metavar, hidden=not self.help
        )
        return Annotated[self.kind | None, option]


def _panel(panel: str, *rows: tuple[Any, ...]) -> list[ServeOption]:
    """Options from rows of name, help and metavar, and further attributes as a mapping."""
    options = []
    for name, help, *more in rows:
        fields: dict[str, Any] = {}
        for each in more:
            fields |= each if isinstance(each, dict) else {"metavar": each}
        options.append(ServeOption(name=name, panel=panel, help=help, **fields))
    return options


_MANY: dict[str, Any] = {"kind": list[str]}
_SWITCH: dict[str, Any] = {"kind": bool}
OPTIONS = [
    *_panel(
        "The models",
        ("model", "", "MODEL", _MANY),
        ("config", "YAML file of these options; under models: each model has its own.", "FILE"),
        ("served_model_name", "Names of the model for clients, or one for each of several models.", "NAME...", _MANY),
        ("revision", "Branch, tag or commit of a hub id.", "NAME"),
        ("runner", ""),
        ("convert", "auto, embed, classify or none."),
        ("task", ""),
        ("device", "auto, cpu, cuda, mps, or several: cuda:0,cuda:1."),
        ("dtype", "auto, float32, float16 or bfloat16."),
        ("quantization", "int8, int8-all or fp8."),
        ("max_model_len", "Most tokens per prompt (16k: 16000, 16K: 16384).", "N"),
        ("hf_overrides", "Merged into config.json; also --hf-overrides.KEY VALUE.", "JSON"),
        ("pooler_config", "vLLM's; also --pooler-config.KEY VALUE.", "JSON"),
        ("override_pooler_config", "", "JSON"),
        ("chat_template", "Jinja file or source, for messages; for a reranker its score template."),
        ("score_template", "Jinja file or source, for a reranker's pairs."),
        ("trust_remote_code", "", _SWITCH),
        ("cache", "File of the vector cache.", "PATH"),
        ("compile", "Compile what gets faster by it.", _SWITCH),
        ("max_batch_tokens", "Most tokens per forward.", "N"),
        ("max_num_batched_tokens", "", "N"),
        ("max_queue", "Most texts waiting for a model; further requests get 429 (16384).", "N"),
        ("index", "Late-interaction index to serve at /v1/indexes/NAME; repeat for more.", "NAME=PATH", _MANY),
    ),
    *_panel(
        "Requests",
        ("max_inputs", "Most texts in one request (2048).", "N"),
        ("max_body_bytes", "Largest body; larger ones get 413 (32M).", "N"),
        ("request_timeout", "Time until a request is given up with 504 (600).", "SECONDS"),
        ("drain_timeout", "Time for running requests after SIGTERM (30).", "SECONDS"),
        ("trust_request_chat_template", "Requests may contain chat templates.", _SWITCH),
    ),
    *_panel(
        "The network",
        ("host", "Address to listen on (127.0.0.1); 0.0.0.0 for all."),
        ("port", "Port to listen on (8000); 0 for a free one.", "N"),
        ("uds", "Listen on a Unix socket instead.", "PATH"),
        ("max_connections", "Most open connections; by default as ulimit -n allows.", "N"),
        ("api_key", "Key that clients must send; repeat for more. Safer: MILLPOND_API_KEY.", "KEY", _MANY),
        ("allowed_origins", "Origin that browsers may call from; repeat for more.", "ORIGIN", _MANY),
        ("root_path", "Path prefix that a proxy strips.", "PATH"),
        ("ssl_certfile", "Certificate; enables TLS.", "PEM"),
        ("ssl_keyfile", "Its key.", "PEM"),
        ("ssl_ca_certs", "Authorities for the clients' certificates.", "PEM"),
    ),
    *_panel(
        "Log and traces",
        ("log_level", "debug, info, warning or error (info).", "LEVEL"),
        ("log_format", "plain or json (plain).", "FORMAT"),
        ("otlp_traces_endpoint", "Where to send traces; needs the extra otel.", "URL"),
        ("log_requests", "A line for each request.", _SWITCH, {"flags": ("--log-requests/--disable-log-requests",)}),
        ("enable_log_requests", "", _SWITCH),
    ),
]


def takes_options(function: Function) -> Function:
    """Let typer see the options of the table in place of ``function``'s ``**flags``."""
    signature = inspect.signature(function, eval_str=True)
    kept = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    added = [
        inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=each.annotation)
        for each in OPTIONS
    ]
    function.__signature__ = signature.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]
    function.__annotations__ |= {each.name: each.annotation for each in added}
    return function
