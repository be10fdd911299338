"""Settings of a server: precedence of the sources, the YAML file, flags as vLLM's users type them, and errors."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.cli.conftest import PROGRAM, main

from millpond.errors import InvalidRequestError, MissingExtraError, SourceNotFoundError
from millpond.server import ModelConfig, ServerConfig
from millpond.server.settings.sources import MODEL_SETTINGS, SERVER_SETTINGS, environment_name, read
from tests.server.conftest import run

# A value for each type that differs from every default: (in Python, as text).
SAMPLES: dict[Any, tuple[Any, str]] = {
    int: (321, "321"),
    int | None: (321, "321"),
    float: (2.5, "2.5"),
    bool: (True, "true"),
    str: ("/else", "/else"),
    str | None: ("else", "else"),
    Path | None: (Path("some/file"), "some/file"),
    tuple[str, ...]: (("one", "two"), "one,two"),
}
SPECIAL = {
    "runner": ("pooling", "pooling"),
    "convert": ("embed", "embed"),
    "task": ("classify", "classify"),
    "dtype": ("half", "half"),
    "otlp_traces_endpoint": ("http://127.0.0.1:9", "http://127.0.0.1:9"),
    "log_requests": (False, "no"),
    "hf_overrides": ({"is_matryoshka": True}, '{"is_matryoshka": true}'),
    "pooler_config": ({"task": "embed"}, '{"task": "embed"}'),
}
ALL = {**MODEL_SETTINGS, **SERVER_SETTINGS}
# Settings that need another setting.
BESIDE = {"ssl_keyfile": {"ssl_certfile": "cert.pem"}, "ssl_ca_certs": {"ssl_certfile": "cert.pem"}}


def sample(setting: str) -> tuple[Any, str]:
    kind = ALL[setting][1]
    if setting in SPECIAL:
        return SPECIAL[setting]
    if get_origin(kind) is Literal:
        return get_args(kind)[-1], get_args(kind)[-1]
    return SAMPLES[kind]


def plain(value: Any) -> Any:
    """The value as YAML represents it."""
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value


def found(setting: str, models: list[str], flags: dict[str, Any], environ: dict[str, str]) -> Any:
    settings = read(models, {**BESIDE.get(setting, {}), **flags}, environ)
    owner = settings.models[0] if setting in MODEL_SETTINGS else settings.server
    return getattr(owner, ALL[setting][0])


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Any], str]:
    def write(content: Any) -> str:
        path = tmp_path / "server.yaml"
        path.write_text(
            content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False), encoding="utf-8"
        )
        return str(path)

    return write


@pytest.mark.parametrize("setting", ALL)
def test_every_setting_is_a_flag_a_variable_and_a_key(setting: str, write: Callable[[Any], str]):
    value, text = sample(setting)
    assert found(setting, ["m"], {}, {}) != value, "the sample must not be the default"
    typed = list(value) if isinstance(value, tuple) else value if isinstance(value, bool) else text
    assert found(setting, ["m"], {setting: typed}, {}) == value
    assert found(setting, ["m"], {}, {environment_name(setting): text}) == value
    for key in (setting, setting.replace("_", "-")):
        assert found(setting, [], {"config": write({"model": "m", key: plain(value)})}, {}) == value


def test_what_is_for_the_server_is_no_option_of_a_model(write: Callable[[Any], str]):
    for setting in SERVER_SETTINGS:
        path = write({"models": [{"model": "m", setting: plain(sample(setting)[0])}]})
        with pytest.raises(InvalidRequestError, match=rf"models\[0\]: {setting} is for the whole server; write it at"):
            read([], {"config": path}, {})


def test_the_command_has_a_flag_for_each_setting():
    unlisted = {"runner", "task", "trust_remote_code"}  # of vLLM; accepted and not listed
    options = {option.name for option in PROGRAM.commands["serve"].params}  # type: ignore[attr-defined]
    assert options == {*ALL, "models", "config"} - unlisted


# Sources from the strongest to the weakest.
LAYERS = ("flag", "variable", "own", "top")


@given(st.dictionaries(st.sampled_from(LAYERS), st.integers(1, 9999), max_size=4))
def test_the_strongest_source_wins(tmp_path_factory: pytest.TempPathFactory, values: dict[str, int]):
    path = tmp_path_factory.mktemp("settings") / "server.yaml"
    own = {"max_queue": values["own"]} if "own" in values else {}
    top = {"max_queue": values["top"]} if "top" in values else {}
    path.write_text(json.dumps({**top, "models": [{"model": "m", **own}]}))  # JSON is YAML
    flags = {"max_queue": str(values["flag"])} if "flag" in values else {}
    environ = {"MILLPOND_MAX_QUEUE": str(values["variable"])} if "variable" in values else {}
    expected = next((values[layer] for layer in LAYERS if layer in values), ModelConfig(model="m").max_queue)
    assert read([], {"config": str(path), **flags}, environ).models[0].max_queue == expected


def test_settings_of_all_models_and_of_one(write: Callable[[Any], str]):
    path = write(
        {"dtype": "bfloat16", "models": {"small": {"model": "a/b", "dtype": "float32"}, "c/d": None, "e": "f/g"}}
    )
    models = read([], {"config": path}, {}).models
    assert [(model.model, model.served_names, model.dtype) for model in models] == [
        ("a/b", ("small",), "float32"),
        ("c/d", ("c/d",), "bfloat16"),
        ("f/g", ("e",), "bfloat16"),
    ]


def test_the_command_line_chooses_among_the_models_of_the_file(write: Callable[[Any], str]):
    path = write({"models": {"small": {"model": "a/b", "max_queue": 5}, "big": "c/d"}})
    models = read(["a/b", "new"], {"config": path}, {"MILLPOND_MODEL": "big"}).models
    assert [(model.model, model.max_queue) for model in models] == [("a/b", 5), ("new", 16384)]
    assert [model.model for model in read([], {"config": path}, {"MILLPOND_MODEL": "big, x"}).models] == ["c/d", "x"]


@pytest.mark.parametrize(
    ("models", "names", "expected"),
    [
        (["m"], ["a", "b"], [("a", "b")]),
        (["m", "n"], ["a", "b"], [("a",), ("b",)]),
        (["m", "n"], None, [("m",), ("n",)]),
    ],
)
def test_names_are_all_of_one_model_or_one_for_each(models: list[str], names: list[str] | None, expected: Any):
    flags = {} if names is None else {"served_model_name": names}
    assert [model.served_names for model in read(models, flags, {}).models] == expected


@pytest.mark.parametrize(
    ("text", "number"), [("8192", 8192), ("16k", 16000), ("16K", 16384), ("1.5k", 1500), ("2M", 2 << 20)]
)
def test_whole_numbers_have_units(text: str, number: int):
    assert read(["m"], {"max_model_len": text}, {}).models[0].max_model_len == number


@pytest.mark.parametrize(
    ("text", "answer"), [("1", True), ("Yes", True), ("on", True), ("false", False), ("0", False), ("OFF", False)]
)
def test_switches_in_the_environment(text: str, answer: bool):
    assert read(["m"], {}, {"MILLPOND_COMPILE": text}).models[0].compile is answer
    assert read(["m"], {}, {"MILLPOND_DISABLE_LOG_REQUESTS": text}).server.log_requests is not answer


def test_older_words_of_vllm(write: Callable[[Any], str]):
    path = write({"model": "m", "override-pooler-config": {"pooling_type": "CLS"}, "max-num-batched-tokens": 7})
    settings = read([], {"config": path}, {})
    assert settings.models[0].pooler_config == {"pooling_type": "CLS"}
    assert settings.models[0].max_batch_tokens == 7
    path = write({"model": "m", "pooler_config": {}, "override_pooler_config": {}})
    with pytest.raises(InvalidRequestError, match="are one setting; give one of them"):
        read([], {"config": path}, {})


def test_resource_arguments_of_vllm_are_named_and_ignored(write: Callable[[Any], str]):
    path = write({"gpu-memory-utilization": 0.9, "models": [{"model": "m", "max_num_seqs": 3}]})
    settings = read([], {"config": path}, {}, ignored_args={"tensor_parallel_size": "1"})
    assert settings.ignored == ("gpu_memory_utilization", "max_num_seqs", "tensor_parallel_size")
    with pytest.raises(InvalidRequestError, match="tensor_parallel_size='2' is not available"):
        read(["m"], {}, {}, ignored_args={"tensor_parallel_size": "2"})


@pytest.mark.parametrize(
    ("environ", "keys"),
    [
        ({"MILLPOND_API_KEY": "a,b"}, ("a", "b")),
        ({"VLLM_API_KEY": "a,b"}, ("a,b",)),
        ({"VLLM_API_KEY": "[x]"}, ("[x]",)),
        ({"MILLPOND_API_KEY": "ours", "VLLM_API_KEY": "theirs"}, ("ours",)),
    ],
)
def test_keys_of_the_environment(environ: dict[str, str], keys: tuple[str, ...]):
    assert read(["m"], {}, environ).server.api_keys == keys


@pytest.mark.parametrize("name", ["MILLPOND_API_KEY", "VLLM_API_KEY"])
def test_an_empty_key_is_refused_and_other_empty_variables_are_none(name: str):
    assert read(["m"], {}, {"MILLPOND_PORT": "", "MILLPOND_MODEL": "", "MILLPOND_CONFIG": ""}).server.port == 8000
    with pytest.raises(InvalidRequestError, match=f"{name} is empty, which would leave the server open"):
        read(["m"], {}, {name: ""})


SECRET = "s3cr3t-of-the-house"


@pytest.mark.parametrize(
    "content",
    [
        f"api_key: *{SECRET}",
        f"api_key: {SECRET}: {SECRET}",
        f"api_key: {{{SECRET}: 1}}",
        f"api_key: [[{SECRET}]]",
        f"api_key: {SECRET}\nport: x",
        f"api_key: {SECRET}\nprot: 1",
        f"api_key: {SECRET}\napi_key: {SECRET}",
        f"models:\n- model: m\n  api_key: {SECRET}",
    ],
)
def test_no_error_tells_a_key(content: str, write: Callable[[Any], str]):
    path = write(content)
    with pytest.raises(InvalidRequestError) as caught:
        read(["m"] if "models" not in content else [], {"config": path}, {})
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert SECRET not in repr(read(["m"], {"api_key": [SECRET]}, {}))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"port": "abc"}, "--port='abc' must be a whole number"),
        ({"port": "70000"}, "port=70000 must be 0 (any free one) to 65535"),
        ({"request_timeout": "soon"}, "--request-timeout='soon' must be a number"),
        ({"request_timeout": "0"}, "request_timeout=0.0 must be a number of seconds, above 0"),
        ({"max_inputs": "0"}, "max_inputs=0 must be 1 or more"),
        ({"hf_overrides": "{"}, "--hf-overrides='{' must be a JSON object"),
        ({"convert": "all"}, "convert='all' is unknown; choose auto, embed, classify or none"),
        ({"log_format": "xml"}, "--log-format='xml' must be one of plain, json"),
        ({"root_path": "api"}, "root_path='api' must begin with /"),
        ({"ssl_keyfile": "x"}, "needs an ssl_certfile"),
        ({"api_key": [""]}, "api_key is empty, which would open the server"),
        ({"served_model_name": ""}, "one of its names is empty"),
        ({"cache": ""}, "--cache='' must be a path"),
        ({"nothing": "1"}, "--nothing is no setting of the server"),
        ({"max_modle_len": "1"}, "--max-modle-len is no setting of the server; did you mean max_model_len?"),
    ],
)
def test_mistakes_are_named(flags: dict[str, Any], message: str):
    with pytest.raises(InvalidRequestError) as caught:
        read(["m"], flags, {})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("- m", "server.yaml must hold settings as key: value"),
        ("port: [", "server.yaml is no YAML at line 1"),
        ("port: true", "server.yaml: port=True must be a whole number"),
        ("model: m\ncompile: 3", "server.yaml: compile=3 must be true or false"),
        ("model: m\nrevision: 12", "server.yaml: revision=12 must be text; put it in quotes"),
        ("allowed_origins: [1]", "must be a text or a list of texts"),
        ("model: m\nhf_overrides: {1: 2}", "must be an object"),
        ("prot: 1", "server.yaml: prot is no setting of the server; did you mean port?"),
        ("port: 1\nport: 2", "server.yaml: line 2 has port a second time; write it once"),
        ("max-queue: 1\nmax_queue: 2", "server.yaml has max_queue a second time"),
        ("model: a\nmodels: [b]", "both model and models"),
        ("models: a", "models must be a list, or a mapping of names to options"),
        ("models: [{dtype: auto}]", "server.yaml: models[0] has no model"),
        ("models: [[a]]", "server.yaml: models[0] must hold settings"),
        ("models: {1: a}", "server.yaml: models.1 is no text"),
        ("models: {a: {model: x, dtyp: auto}}", "server.yaml: models.a: dtyp is no setting of the server"),
        ("models: [a, a]", "a and a are both called 'a'; give each its served_model_name"),
        ("", "there is no model to serve"),
        ("model: !!python/object/apply:os.getcwd []", "server.yaml is no YAML"),
    ],
)
def test_mistakes_of_a_file_are_named(content: str, message: str, write: Callable[[Any], str]):
    path = write(content)
    with pytest.raises(InvalidRequestError) as caught:
        read([], {"config": path}, {})
    assert message in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(SourceNotFoundError, match="is not there; give the path of a YAML file"):
        read(["m"], {"config": str(tmp_path / "none.yaml")}, {})
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        read(["m"], {"config": str(tmp_path)}, {})


PAGE = (Path(__file__).parents[3] / "docs" / "server.md").read_text(encoding="utf-8")


def test_every_setting_is_in_the_documentation():
    rows = {line.split("|")[1].strip(): line for line in PAGE.splitlines() if line.startswith("| `--")}
    for name in ALL:
        flag = f"`--{name.replace('_', '-')}`"
        row = next((row for key, row in rows.items() if flag in key), "")
        assert f"`{environment_name(name)}`" in row, f"{flag} has no row with its variable"


def test_the_file_is_read(tmp_path: Path):
    (block,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "server.yaml"
    path.write_text(block, encoding="utf-8")
    settings = read([], {"config": str(path)}, {})
    assert settings.server.port == 8080
    assert [(model.served_names, model.dtype, model.max_model_len, model.max_queue) for model in settings.models] == [
        (("bge",), "bfloat16", 256, 16384),
        (("BAAI/bge-reranker-base", "judge", "ranker"), "bfloat16", None, 4096),
    ]
    assert [model.model for model in read(["bge"], {"config": str(path)}, {}).models] == ["BAAI/bge-small-en-v1.5"]


# Flags


@pytest.fixture(autouse=True)
def no_settings_of_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("MILLPOND_", "VLLM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(run.heap, "limit_arenas", lambda: False)  # it would last


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["m", "--prot", "1"], "serve has no flag --prot; did you mean --port?"),
        (["m", "--port"], "--port needs a value behind it"),
        (["m", "--compile=3"], "--compile takes no value"),
        (
            "--served-model-name a m --served-model-name b n".split(),
            "--served-model-name takes every word up to the next flag, and would make names of n; put the models first",
        ),
        (["m", "--hf-overrides", "{}", "--hf-overrides.a", "1"], "--hf-overrides is given as JSON and key by key"),
        (["m", "--hf-overrides.a", "1", "--hf-overrides.a.b", "1"], "--hf-overrides.a.b contradicts an earlier flag"),
        (["m", "--port.a", "1"], "serve has no flag --port.a"),
        (["m", "--tensor-parallel-size", "2"], "tensor_parallel_size='2' is not available"),
        (["m", "m"], "m and m are both called 'm'"),
        ([], "there is no model to serve"),
        (["m", "--runner", "generate"], "runner='generate'"),
        (["m", "--dtype", "float8"], "--dtype='float8' is unknown; choose auto, float32"),
        (["m", "--ssl-certfile", "none.pem"], "--ssl-certfile='none.pem' is not there"),
        (["m", "--host", "host.invalid"], "--host='host.invalid', --port=8000 cannot be listened on"),
    ],
)
def test_wrong_flags_end_with_2_and_one_line(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], unlogged: None
):
    monkeypatch.setattr(sys, "argv", ["millpond", "serve", *words])
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capsys.readouterr()
    assert end.value.code == 2
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith(f"millpond: {message}")


def test_the_programs_own_log_level_counts(command: Any, monkeypatch: pytest.MonkeyPatch):
    assert command("m")[1].log_level == "info"
    assert command("m", before=["--log-level", "debug"])[1].log_level == "debug"
    assert command("m", "--log-level", "error", before=["--log-level", "debug"])[1].log_level == "error"


@pytest.mark.parametrize("name", ["uvicorn", "fastapi", "yaml"])
def test_a_missing_package_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf"needs {name}: pip install 'millpond\[server\]'"):
        PROGRAM(["serve", "m"], standalone_mode=False)


def test_the_help_spells_every_flag_out_in_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["millpond", "serve", "--help"])
    with pytest.raises(SystemExit) as end:
        main()
    out = capsys.readouterr().out
    assert end.value.code == 0
    command = PROGRAM.commands["serve"]  # type: ignore[attr-defined]
    flags = {
        flag
        for param in command.params
        if not getattr(param, "hidden", False)
        for flag in (*param.opts, *param.secondary_opts)
        if flag.startswith("--")
    }
    assert [flag for flag in sorted(flags) if not re.search(rf"{flag}(?![\w-])", out)] == []


@pytest.mark.parametrize(
    ("typed", "changed", "ignored"),
    [
        ("m --port=1 --compile", {"port": 1, "compile": True}, ""),
        ("m --served-model-name a b --port 1", {"names": ("a", "b"), "port": 1}, ""),
        ("--model m --served_model_name a", {"names": ("a",)}, ""),
        ("-q int8 m --max-num-batched-tokens 7", {"quantization": "int8", "max_batch_tokens": 7}, ""),
        ("m --task embed --runner pooling", {"task": "embed", "runner": "pooling"}, ""),
        ("m --trust-remote-code --disable-log-requests", {"trust_remote_code": True, "log_requests": False}, ""),
        ("m --no-enable-log-requests", {"log_requests": False}, ""),
        (
            "-tp 1 --enforce-eager --no-enable-prefix-caching --gpu-memory-utilization 0.5 --max_num_seqs=3 m",
            {},
            "enable_prefix_caching, enforce_eager, gpu_memory_utilization, max_num_seqs, tensor_parallel_size",
        ),
        ("m --hf-overrides.a.b 1 --hf-overrides.c=d", {"hf_overrides": {"a": {"b": 1}, "c": "d"}}, ""),
        ("-- m", {}, ""),
    ],
)
def test_words_as_vllm_takes_them(
    typed: str, changed: dict[str, Any], ignored: str, command: Any, capsys: pytest.CaptureFixture[str]
):
    (model,), server = command(*typed.split())
    settings = {**dataclasses.asdict(ModelConfig(model="m")), **dataclasses.asdict(ServerConfig())}
    assert {**dataclasses.asdict(model), **dataclasses.asdict(server)} == {**settings, **changed}
    err = capsys.readouterr().err
    assert err.strip().endswith(f"no meaning here, and ignored: {ignored}") if ignored else err == ""
