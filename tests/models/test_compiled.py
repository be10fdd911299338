"""compile=True: compiled parts give the same results, are kept for the next process, and never make a call fail."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.tiny import write_checkpoint

from millpond import Engine
from millpond.errors import InvalidRequestError, ModelLoadError
from millpond.models import compiled


def _has_compiler() -> bool:
    try:
        compiled.check_compiler(torch.device("cpu"))
    except ModelLoadError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not _has_compiler(), reason="no C++ compiler here: compile=True cannot be tested")
# Warnings of Inductor: a slow probe of the compiler on a busy machine, deprecated calls inside torch.
quiet = pytest.mark.filterwarnings("ignore")

TEXTS = tuple(f"the pond is {i} feet deep " * (1 + i % 6) for i in range(40))  # enough tokens to run compiled code


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of this module's compiled code."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def make(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Engine, Engine]]:
    """A family's engine, compiled and as written."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))

    def make(family: str, **options: Any) -> tuple[Engine, Engine]:
        model = write_checkpoint(tmp_path / family, family)
        options = {"device": "cpu", "dtype": "float32", **options}
        return Engine(model, compile=True, **options), Engine(model, **options)

    return make


def parts_of(engine: Engine) -> list[compiled.CompiledPart]:
    parts = {
        id(value.func): value.func
        for module in engine._replicas.runners[0].backbone.modules()
        for value in vars(module).values()
        if isinstance(getattr(value, "func", None), compiled.CompiledPart)
    }
    return list(parts.values())


def difference(ours: Engine, reference: Engine) -> float:
    return float(np.abs(ours.embed(TEXTS).embeddings - reference.embed(TEXTS).embeddings).max())


@pytest.mark.slow
@needs_compiler
@quiet
def test_compiled_code_equals_the_code_as_written(make, caplog):
    with caplog.at_level(logging.INFO, "millpond"):
        ours, reference = make("bert")
    (part,) = parts_of(ours)
    assert "1 parts in" in caplog.text and not part.failed
    assert difference(ours, reference) <= 1e-5
    code = part._compiled
    part._compiled = lambda *inputs: code(*inputs).index_fill_(1, torch.tensor([3]), 1.0)  # as if the code were wrong
    assert difference(ours, reference) > 1e-3  # so compiled code ran
    assert np.array_equal(
        ours.embed(["a"]).embeddings, reference.embed(["a"]).embeddings
    )  # too short for compiled code


@needs_compiler
@quiet
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["modernbert", "nomic", "qwen3", "gemma3", "albert"])
def test_every_packed_family_compiles(family, dtype, make):
    ours, reference = make(family, dtype=dtype)
    assert all(not part.failed for part in parts_of(ours))
    assert parts_of(ours) or (family, dtype) == ("albert", "bfloat16")
    if dtype == "float32":
        assert difference(ours, reference) <= 1e-5
    else:
        cosines = (ours.embed(TEXTS).embeddings * reference.embed(TEXTS).embeddings).sum(1)
        assert cosines.min() >= 0.999


@needs_compiler
@quiet
@pytest.mark.slow
def test_quantized_layers_are_called_from_compiled_code(make):
    ours, reference = make("qwen3", quantization="int8")
    assert parts_of(ours) and all(not part.failed for part in parts_of(ours))
    assert difference(ours, reference) <= 1e-2


_START = """
import sys, torch
from millpond import Engine
Engine(sys.argv[1], device="cpu", dtype="float32", compile=True)
counted = torch._dynamo.utils.counters["inductor"]
print(counted["fxgraph_cache_hit"], counted["fxgraph_cache_miss"])
"""


@needs_compiler
@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path):
    model = write_checkpoint(tmp_path / "model", "bert")
    environment = {key: value for key, value in os.environ.items() if key != "TORCHINDUCTOR_CACHE_DIR"}
    environment["XDG_CACHE_HOME"] = str(tmp_path / "cache")

    def start() -> list[str]:
        command = [sys.executable, "-c", _START, str(model)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=600)
        return run.stdout.split()

    assert start() == ["0", "1"]
    assert start() == ["1", "0"]
    kept = tmp_path / "cache" / "millpond" / "compile"
    assert kept.stat().st_mode & 0o777 == 0o700
    assert any(kept.iterdir())


@needs_compiler
@quiet
def test_a_part_that_cannot_be_compiled_runs_as_written(make, monkeypatch, caplog):
    def refuse(*inputs: Any, **options: Any) -> Any:
        def run(*inputs: Any) -> Any:
            raise torch._dynamo.exc.Unsupported("a loop of the mill")

        return run

    monkeypatch.setattr(torch, "compile", refuse)
    ours, reference = make("bert")
    (part,) = parts_of(ours)
    assert part.failed
    assert caplog.text.count("runs as written") == 1 and "a loop of the mill" in caplog.text
    assert difference(ours, reference) == 0


@needs_compiler
def test_a_model_with_nothing_to_compile_says_so(make, caplog):
    ours, reference = make("deberta-v2")
    assert "changes nothing here" in caplog.text
    assert parts_of(ours) == [] and difference(ours, reference) == 0


def test_without_a_compiler_the_option_is_refused_before_weights_are_read(tmp_path, monkeypatch):
    import torch._inductor.cpp_builder as builder
    from torch._inductor.exc import InvalidCxxCompiler

    def no_compiler() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(builder, "get_cpp_compiler", no_compiler)
    model = write_checkpoint(tmp_path / "model", "bert")
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"needs a C\+\+ compiler.*leave compile out"):
        Engine(model, device="cpu", compile=True)


@pytest.mark.parametrize("value", [1, "yes", None])
def test_compile_must_be_a_bool(value):
    with pytest.raises(InvalidRequestError, match="compile=.*True or False"):
        Engine("model", compile=value)


def test_a_folder_that_cannot_be_made_is_left_to_torch(tmp_path, monkeypatch, caplog):
    (tmp_path / "millpond").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    compiled._use_folder()
    assert "cannot be used" in caplog.text and str(tmp_path) not in os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
