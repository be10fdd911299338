"""Settings of a server: precedence of the sources, the YAML file, and error messages."""

from __future__ import annotations

import dataclasses
import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.main import get_command

from millpond.cli.app import app
from millpond.errors import InvalidRequestError, SourceNotFoundError
from millpond.server import ModelConfig, ServerConfig
from millpond.server.settings.sources import MODEL_SETTINGS, NAMES, SERVER_SETTINGS, SYNONYMS, environment_name, read

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


@pytest.mark.parametrize("setting", MODEL_SETTINGS)
def test_a_model_has_options_of_its_own(setting: str, write: Callable[[Any], str]):
    value, _ = sample(setting)
    path = write({"models": [{"model": "m", setting: plain(value)}, "other"]})
    first, second = read([], {"config": path}, {}).models
    field = ALL[setting][0]
    assert getattr(first, field) == value
    assert getattr(second, field) == getattr(ModelConfig(model="other"), field)


@pytest.mark.parametrize("setting", SERVER_SETTINGS)
def test_what_is_for_the_server_is_no_option_of_a_model(setting: str, write: Callable[[Any], str]):
    path = write({"models": [{"model": "m", setting: plain(sample(setting)[0])}]})
    with pytest.raises(
        InvalidRequestError, match=rf"models\[0\]: {setting} is for the whole server; write it at the top"
    ):
        read([], {"config": path}, {})


def test_the_command_has_a_flag_for_each_setting():
    command = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    other_names = SYNONYMS.keys() & {option.name for option in command.params}  # vLLM's, which are not listed
    assert {option.name for option in command.params} - other_names == {*ALL, "models", "model", "config"}


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
        f"api_key: !{SECRET}",
        f"api_key: '{SECRET}",
        f"api_key: {SECRET}: {SECRET}",
        f"api_key: {{{SECRET}: 1}}",
        f"api_key: [[{SECRET}]]",
        f"api_key: {SECRET}\nport: x",
        f"api_key: {SECRET}\nprot: 1",
        f"api_key: {SECRET}\nmodels: 3",
        f"api_key: {SECRET}\napi-key: {SECRET}",
        f"api_key: {SECRET}\napi_key: {SECRET}",
        f"models:\n- model: m\n  api_key: {SECRET}",
    ],
)
def test_no_error_tells_a_key(content: str, write: Callable[[Any], str]):
    path = write(content)
    with pytest.raises(InvalidRequestError) as caught:
        read(["m"] if "models" not in content else [], {"config": path}, {})
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_no_repr_tells_a_key():
    settings = read(["m"], {"api_key": [SECRET]}, {})
    assert settings.server.api_keys == (SECRET,)
    assert SECRET not in repr(settings)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"port": "abc"}, "--port='abc' must be a whole number"),
        ({"port": "80.5"}, "--port='80.5' must be a whole number"),
        ({"port": "70000"}, "port=70000 must be 0 (any free one) to 65535"),
        ({"request_timeout": "soon"}, "--request-timeout='soon' must be a number"),
        ({"request_timeout": "0"}, "request_timeout=0.0 must be a number of seconds, above 0"),
        ({"request_timeout": "nan"}, "request_timeout=nan must be"),
        ({"drain_timeout": "inf"}, "drain_timeout=inf must be 0 or more"),
        ({"max_inputs": "0"}, "max_inputs=0 must be 1 or more"),
        ({"max_connections": "0"}, "max_connections=0 must be 1 or more"),
        ({"max_connections": "many"}, "must be a whole number"),
        ({"max_model_len": "0"}, "max_model_len=0 must be 1 or more"),
        ({"hf_overrides": "{"}, "--hf-overrides='{' must be a JSON object"),
        ({"hf_overrides": "[1]"}, "--hf-overrides='[1]' must be an object"),
        ({"runner": "generate"}, "runner='generate'"),
        ({"convert": "all"}, "convert='all' is unknown; choose auto, embed, classify or none"),
        ({"task": "generate"}, "task='generate' is unknown"),
        ({"log_format": "xml"}, "--log-format='xml' must be one of plain, json"),
        ({"root_path": "api"}, "root_path='api' must begin with /"),
        ({"ssl_keyfile": "x"}, "needs an ssl_certfile"),
        ({"api_key": [""]}, "api_key is empty, which would open the server"),
        ({"served_model_name": ["a", "a"]}, "both called 'a'"),
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
        ("a: \x00", "server.yaml is no YAML"),
        ("port: '8o'", "server.yaml: port='8o' must be a whole number"),
        ("port: true", "server.yaml: port=True must be a whole number"),
        ("model: m\ncompile: 3", "server.yaml: compile=3 must be true or false"),
        ("model: m\nrevision: 12", "server.yaml: revision=12 must be text; put it in quotes"),
        ("request_timeout: [1]", "server.yaml: request_timeout=[1] must be a number"),
        ("allowed_origins: [1]", "must be a text or a list of texts"),
        ("model: m\nhf_overrides: {1: 2}", "must be an object"),
        ("log_level: [debug]", "must be one of debug, info"),
        ("prot: 1", "server.yaml: prot is no setting of the server; did you mean port?"),
        ("port: 1\nport: 2", "server.yaml: line 2 has port a second time; write it once"),
        ("max-queue: 1\nmax_queue: 2", "server.yaml has max_queue a second time"),
        ("model: a\nmodels: [b]", "both model and models"),
        ("models: a", "models must be a list, or a mapping of names to options"),
        ("models: [{dtype: auto}]", "server.yaml: models[0] has no model"),
        ("models: [{model: 3}]", "server.yaml: models[0]: model must be a hub id or a folder"),
        ("models: [[a]]", "server.yaml: models[0] must hold settings"),
        ("models: {1: a}", "server.yaml: models.1 is no text"),
        ("models: {a: {}, a: {}}", "line 1 has a a second time"),
        ("models: {a: {model: x, dtyp: auto}}", "server.yaml: models.a: dtyp is no setting of the server"),
        ("models: [a, a]", "a and a are both called 'a'; give each its served_model_name"),
        ("models: [a, b]\nserved_model_name: [c]", "1 names for 2 models"),
        ("port: 1", "there is no model to serve"),
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


def test_a_file_may_repeat_itself_by_merge_keys(write: Callable[[Any], str]):
    path = write("models:\n- &first {model: a, dtype: float32}\n- {<<: *first, model: b}\n")
    assert [(model.model, model.dtype) for model in read([], {"config": path}, {}).models] == [
        ("a", "float32"),
        ("b", "float32"),
    ]


@pytest.mark.parametrize("config", [ModelConfig, ServerConfig])
def test_every_field_is_explained(config: type):
    for field in dataclasses.fields(config):
        assert f"        {field.name}: " in (config.__doc__ or "")


def test_every_setting_is_in_the_documentation():
    page = (Path(__file__).parents[3] / "docs" / "server.md").read_text(encoding="utf-8")
    rows = {line.split("|")[1].strip(): line for line in page.splitlines() if line.startswith("| `--")}
    for name in ALL:
        flag = f"`--{name.replace('_', '-')}`"
        row = next((row for key, row in rows.items() if flag in key), "")
        assert f"`{environment_name(name)}`" in row, f"{flag} has no row with its variable"
    assert ALL.keys() <= NAMES
