"""Import cost: the data modules, the package itself and the program's help do not import torch."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import millpond
import millpond.ingest
import millpond.late_interaction

HEAVY = ("torch", "transformers", "tokenizers", "langchain_core", "llama_index", "qdrant_client", "pymilvus")
LIGHT = [
    "errors",
    "tasks",
    "spec",
    "ragged",
    "matryoshka",
    "quantization",
    "config",
    "params",
    "inputs",
    "outputs",
    "cache",
    "engine",
    "engine.shared",
    "ingest",
    "ingest.batch",
    "ingest.collection",
    "ingest.manifest",
    "ingest.record",
    "ingest.sources",
    "ingest.sink",
    "ingest.url",
    "late_interaction",
    "checkpoints.architectures",
    "cli.app",
]


_LOAD = f"""
import importlib, sys

for module in sys.argv[1:]:
    for name in [name for name in sys.modules if name.partition(".")[0] == "millpond"]:
        del sys.modules[name]
    importlib.import_module(module)
    print(module, *(name for name in {HEAVY} if name in sys.modules))
"""


def loaded_by(*modules: str) -> dict[str, set[str]]:
    """The modules of ``HEAVY`` loaded after importing each of ``modules`` in turn in a new interpreter.

    Each is imported as the first module of millpond, so that no earlier import hides an import circle.
    """
    command = [sys.executable, "-c", _LOAD, *modules]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return {module: set(heavy) for module, *heavy in map(str.split, run.stdout.splitlines())}


def test_light_modules_load_nothing_heavy():
    modules = ["millpond", *(f"millpond.{name}" for name in LIGHT)]
    assert loaded_by(*modules) == {module: set() for module in modules}


def test_a_heavy_import_is_detected():
    loaded = loaded_by("millpond.errors", "millpond.attention.sdpa")
    assert loaded["millpond.errors"] == set()
    assert "torch" in loaded["millpond.attention.sdpa"]


@pytest.mark.parametrize("package", [millpond, millpond.ingest, millpond.late_interaction], ids=lambda m: m.__name__)
def test_every_public_name_can_be_imported(package):
    assert set(package.__all__) <= set(dir(package))
    assert not [name for name in package.__all__ if inspect.ismodule(getattr(package, name))]


@pytest.mark.parametrize("package", [millpond, millpond.ingest, millpond.late_interaction], ids=lambda m: m.__name__)
def test_an_unknown_name_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'nothing'"):
        _ = package.nothing
