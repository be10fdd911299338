"""Messages of the Python API in the words of the command line."""

from __future__ import annotations

import pytest
import typer

from millpond.cli.app import app
from millpond.cli.arguments.flags import flags_of, in_flags

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def rewritten(command: str, message: str) -> str:
    return in_flags(message, flags_of(COMMANDS[command].params))


@pytest.mark.parametrize(
    ("command", "message", "expected"),
    [
        ("embed", "dimensions=2048 is more than m has (1024)", "--dimensions 2048 is more than m has (1024)"),
        ("embed", "leave dimensions out, or", "leave --dimensions out, or"),
        (
            "embed",
            'force it with hf_overrides={"a": [True, None]}',
            "force it with --hf-overrides '{\"a\": [true, null]}'",
        ),
        ("embed", 'hf_overrides={"a": [...]})', '--hf-overrides \'{"a": ["..."]}\')'),
        ("embed", "normalize=False; normalize=True", "--no-normalize; --normalize"),
        ("embed", "quantization=None and pooling='cls'.", "no --quantization and --pooling cls."),
        ("embed", "prompt='it\\'s' and prompt_name=\"a b\"", "--prompt 'it'\"'\"'s' and --prompt-name 'a b'"),
        ("embed", "cache='/no where/c': there", "--cache '/no where/c': there"),
        ("embed", "more than max_length=256; shorten it", "more than --max-length 256; shorten it"),
        ("embed", 'this one with convert="classify" if', "this one with --convert classify if"),
        ("serve", "max_length=64 and max_queue=5", "--max-model-len 64 and --max-queue 5"),
        ("ingest", "pass dimensions=[128, 384], or fields='plain'", "pass --dimensions 128,384, or --fields plain"),
        ("ingest", "(keep_empty=True keeps them)", "(--keep-empty keeps them)"),
        ("ingest", "id_column and text_column are both 'x'", "--id and --text are both 'x'"),
        ("ingest", "types=year=integer is unknown", "--types year=integer is unknown"),
        # An engine and a sink have a quantization each.
        ("ingest", "quantization='int8' needs a GPU", "--quantization int8 needs a GPU"),
        ("advise", "quantization='scalar' is none", "--quantization scalar is none"),
        (
            "ingest",
            "created with index_quantization=None, asks for index_quantization='scalar'; leave index_quantization out",
            "created with no --index-quantization, asks for --index-quantization scalar; "
            "leave --index-quantization out",
        ),
        ("rerank", "top_n=0 must be an int from 1", "--top-n 0 must be an int from 1"),
        # What is no argument stays: words, paths, quotes, attributes, options, names of another command.
        ("embed", "the model, its prompt and its role", "the model, its prompt and its role"),
        ("embed", "'/data/max_length=5/x' has no file", "'/data/max_length=5/x' has no file"),
        ("embed", "config.max_length and 'max_length'", "config.max_length and 'max_length'"),
        ("embed", "'/data/a dtype=b/x' has no file", "'/data/a dtype=b/x' has no file"),
        ("rerank", "columns 'my top_n', \"a top_n b\"; top_n=3", "columns 'my top_n', \"a top_n b\"; --top-n 3"),
        (
            "embed",
            "the model's 'a \\' dtype=b' and it's max_length=5",
            "the model's 'a \\' dtype=b' and it's --max-length 5",
        ),
        ("embed", "--max-length 5 max_lengths", "--max-length 5 max_lengths"),
        ("env", "max_length=5", "max_length=5"),
    ],
)
def test_arguments_become_options(command: str, message: str, expected: str) -> None:
    assert rewritten(command, message) == expected


@pytest.mark.parametrize("value", ["", "'", "[", "{", "['a", '{"a"', "'unfinished", "(", "=", "[]", "{}"])
def test_a_value_that_cannot_be_read_loses_nothing(value: str) -> None:
    message = f"before cache={value} after"
    result = rewritten("embed", message)
    assert result.startswith("before ") and result.endswith("after")


@pytest.mark.parametrize("value", [r"C:\Users\x", r"\x", r"\N{none}", "\0", "[" * 100_000])
def test_a_value_that_python_did_not_write_stays(value: str) -> None:
    assert value in rewritten("embed", f"cache='{value}' after")
    assert value in rewritten("embed", f"cache={value} after")
