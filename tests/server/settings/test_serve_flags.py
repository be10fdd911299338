"""The flags of ``millpond serve``, as vLLM's users type them."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from millpond.cli.app import app, main
from millpond.cli.arguments.vllm_flags import read
from millpond.errors import InvalidRequestError, MissingExtraError
from millpond.support import heap


@pytest.fixture(autouse=True)
def no_settings_of_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("MILLPOND_", "VLLM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(heap, "limit_arenas", lambda: False)  # it would last


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["m", "--port", "abc"], "--port='abc' must be a whole number"),
        (["m", "--prot", "1"], "serve has no flag --prot; did you mean --port?"),
        (["m", "-x"], "serve has no flag -x"),
        (["m", "--port"], "--port needs a value behind it"),
        (["m", "--compile=3"], "--compile takes no value"),
        (["m", "--tensor-parallel-size", "2"], "tensor_parallel_size='2' is not available"),
        (["m", "--served-model-name"], "--served-model-name needs a name"),
        (["m", "n", "--served-model-name", "a"], "--served-model-name=a: 1 names for 2 models"),
        (["m", "m"], "m and m are both called 'm'"),
        ([], "there is no model to serve"),
        (["m", "--config", "none.yaml"], "--config='none.yaml' is not there"),
        (["m", "--runner", "generate"], "--runner='generate'"),
        (["m", "--dtype", "float8"], "--dtype='float8' is unknown; choose auto, float32"),
        (["m", "--ssl-certfile", "none.pem"], "--ssl-certfile='none.pem' is not there"),
        (["m", "--host", "host.invalid"], "--host='host.invalid', port=8000 cannot be listened on"),
    ],
)
def test_wrong_flags_end_with_2_and_one_line(
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    unlogged: None,
):
    monkeypatch.setattr(sys, "argv", ["millpond", "serve", *words])
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capsys.readouterr()
    assert end.value.code == 2
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith(f"millpond: {message}")


@pytest.mark.parametrize(
    ("before", "after", "level"),
    [
        ([], [], logging.INFO),
        (["--log-level", "debug"], [], logging.DEBUG),
        (["--log-level", "debug"], ["--log-level", "error"], logging.ERROR),
    ],
)
def test_the_programs_own_log_level_counts(
    before: list[str],
    after: list[str],
    level: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    unlogged: None,
):
    monkeypatch.setattr(sys, "argv", ["millpond", *before, "serve", str(tmp_path), "--port", "0", *after])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    assert logging.getLogger("millpond").level == level


@pytest.mark.parametrize("name", ["uvicorn", "fastapi", "yaml"])
def test_a_missing_package_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, name, None)
    command = get_command(app)
    with pytest.raises(MissingExtraError, match=rf"needs {name}: pip install 'millpond\[server\]'"):
        command(["serve", "m"], standalone_mode=False)


def test_the_help_spells_every_flag_out_in_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["millpond", "serve", "--help"])
    with pytest.raises(SystemExit) as end:
        main()
    out = capsys.readouterr().out
    assert end.value.code == 0
    command = get_command(app).get_command(None, "serve")
    flags = {
        flag
        for param in command.params
        if not getattr(param, "hidden", False)
        for flag in (*param.opts, *param.secondary_opts)
        if flag.startswith("--")
    }
    assert [flag for flag in sorted(flags) if not re.search(rf"{flag}(?![\w-])", out)] == []


OPTIONS = {
    "--port": True,
    "--compile": False,
    "--served-model-name": True,
    "--hf-overrides": True,
    "--quantization": True,
}


@pytest.mark.parametrize(
    ("typed", "words", "ignored_args"),
    [
        ("m --port=1 --compile", "m --port 1 --compile", {}),
        ("m --served-model-name a b --port 1", "m --served-model-name a --served-model-name b --port 1", {}),
        ("m --served_model_name a", "m --served-model-name a", {}),
        ("-q int8 m", "--quantization int8 m", {}),
        ("-tp 1 m", "m", {"tensor_parallel_size": "1"}),
        ("--enforce-eager m", "m", {"enforce_eager": "true"}),
        ("--no-enable-prefix-caching m", "m", {"enable_prefix_caching": "false"}),
        (
            "--gpu-memory-utilization 0.5 --max_num_seqs=3 m",
            "m",
            {"gpu_memory_utilization": "0.5", "max_num_seqs": "3"},
        ),
        ("m --hf-overrides.a.b 1 --hf-overrides.c=d", 'm --hf-overrides {"a":{"b":1},"c":"d"}', {}),
        ("m -- --port", "m -- --port", {}),
    ],
)
def test_words_as_vllm_takes_them(typed: str, words: str, ignored_args: dict[str, str]):
    assert read(typed.split(), OPTIONS) == (
        [json.dumps(json.loads(word)) if word.startswith("{") else word for word in words.split()],
        ignored_args,
    )


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--served-model-name a m --served-model-name b n", "would make names of n; put the models first"),
        ("--hf-overrides {} --hf-overrides.a 1", "as JSON and key by key"),
        ("--hf-overrides.a 1 --hf-overrides.a.b 1", "contradicts an earlier flag"),
        ("--port.a 1", "serve has no flag --port.a"),
    ],
)
def test_words_that_contradict(typed: str, message: str):
    with pytest.raises(InvalidRequestError, match=message):
        read(typed.split(), OPTIONS)
