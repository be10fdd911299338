"""The program itself: its help, its exit codes, options written NAME=VALUE, and errors that name an option."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import PROGRAM, Run

import millpond


def commands(command: Any, name: str = "millpond") -> dict[str, Any]:
    """Every command by its full name."""
    inner = {
        key: value
        for each, one in getattr(command, "commands", {}).items()
        for key, value in commands(one, f"{name} {each}").items()
    }
    return {name: command, **inner}


COMMANDS = commands(PROGRAM)


@pytest.mark.contract
def test_the_script_and_the_module_are_one_program():
    script = Path(sys.executable).with_name("millpond")
    starts = [[str(script)], [sys.executable, "-m", "millpond"]]
    outputs = [subprocess.check_output([*start, "--version"], text=True, timeout=60) for start in starts]
    assert outputs == [f"millpond {millpond.__version__}\n"] * 2


def test_without_arguments_it_names_its_commands(run: Run):
    result = run(code=2)
    assert all(name.split()[1] in result.out + result.err for name in COMMANDS if " " in name)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(run: Run, name: str):
    result = run(*name.split()[1:], "--help", code=0)
    assert f"Usage: {name} " in result.out.replace("usage:", "Usage:") and result.err == ""


def test_the_program_has_few_options():
    # Ten for mcp and --protocol, eight for eval, 14 for copy and trace, 24 for watch, 13 for audit, 40 for migrate,
    # three for --chunk-context (ingest, watch) and --expand, two for --budget-ms.
    assert sum(len(command.params) for command in COMMANDS.values()) <= 312


@pytest.mark.parametrize("command", [["embed"], ["rerank", "how deep?"]])
def test_a_model_that_is_not_there_is_exit_2(run: Run, command: list[str]):
    err = run(*command, "-m", "nobody/nothing", stdin="mill", code=2).err
    assert err.startswith("millpond: nobody/nothing ") and err.count("\n") == 1


def test_a_bug_keeps_its_traceback(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("millpond.native.library.isa", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("env")


@pytest.mark.parametrize(
    ("words", "fact", "value"),
    [
        (["max_length=24"], "max length", "24 tokens"),
        (["normalize=true", "pooling=cls"], "normalize", "yes"),
        (['pooling="cls"'], "pooling", "cls"),
        (['hf_overrides={"matryoshka_dimensions": [8, 48]}'], "matryoshka", "8, 48"),
        (['device=["cpu"]'], "normalize", "no"),
    ],
)
def test_an_engine_gets_options_of_its_types(run: Run, model: Path, words: list[str], fact: str, value: str):
    out = run("models", model, *(part for word in words for part in ("--engine", word)), code=0).out
    assert dict(line.split("  ", 1) for line in out.splitlines())[fact].strip() == value


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["dtyp=float32"], "'dtyp' is not an option of Engine; choose activation, backend, compile,"),
        (["dtype"], "'dtype' is not NAME=VALUE"),
        (["pooling=cls", "pooling=mean"], "'pooling' is written twice"),
        (["max_length=many"], "--engine max_length=many must be a positive int"),
        (["convert=generate"], "--engine convert=generate is unknown; choose auto, embed or classify"),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_an_option_that_no_engine_has_is_exit_2(run: Run, model: Path, words: list[str], message: str):
    done = run("embed", "-m", model, *(part for word in words for part in ("--engine", word)), stdin="mill", code=2)
    assert message in " ".join(done.err.replace("│", " ").split()) and done.out == ""


def test_an_error_begins_with_the_option_that_it_is_about(run: Run, model: Path, tmp_path: Path):
    err = run("embed", "-m", model, "--dimensions", "16", stdin="mill", code=2).err
    assert err.startswith("millpond: --dimensions=16 cuts ") and err.count("\n") == 1
    err = run("index", "build", tmp_path / "i", tmp_path / "none", "-m", model, code=2).err
    assert err.startswith("millpond: there is no file")
