"""``millpond models``: the architectures, and one checkpoint as the engine has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.conftest import Run

from millpond import Engine


def facts(out: str) -> dict[str, str]:
    return {name.strip(): value.strip() for name, _, value in (line.partition("  ") for line in out.splitlines())}


def test_every_architecture_has_a_line(run: Run):
    listed = {line.split()[0]: line for line in run("models", code=0).out.splitlines()}
    for model_type, words in (("bert", "BertModel"), ("qwen3", "Qwen3Model")):
        assert set(words.split()) <= set(listed[model_type].split())
    assert len(listed) > 20


def test_a_checkpoint_is_described_as_the_engine_has_it(run: Run, model: Path, engine_of: Callable[..., Engine]):
    found, spec = facts(run("models", model, code=0).out), engine_of(model).spec
    assert found["dimensions"] == str(spec.dimensions) and found["max length"] == f"{spec.max_length} tokens"
    assert (found["pooling"], found["matryoshka"], found["prompt 'query'"]) == ("mean", "no", "'find: '")
    assert found["fingerprint"] == spec.fingerprint


@pytest.mark.parametrize(
    ("convert", "tasks"), [("auto", "classify, reward, score, token_classify"), ("embed", "embed, token_embed")]
)
def test_a_conversion_shows(run: Run, cross: Path, convert: str, tasks: str):
    assert facts(run("models", cross, "--engine", f"convert={convert}", code=0).out)["tasks"] == tasks


def test_the_census_prints_every_name_and_the_numbers(run: Run):
    answer = json.loads(run("models", "--census", "--format", "json", code=0).out)
    served = [each for each in answer["checkpoints"] if each["served"]]
    assert (answer["names"], answer["served"]) == (len(answer["checkpoints"]), len(served))
    table = run("models", "--census", code=0).out
    assert f"{len(served)} of {answer['names']} are served" in table
    for each in answer["checkpoints"]:
        assert (each["name"] if each["served"] else each["reason"]) in table
    assert "leave it out" not in run("models", "BAAI/bge-m3", "--census", code=2).out


def test_the_difference_to_another_checkpoint(run: Run, model: Path, cross: Path):
    same = facts(run("models", model, "--source", model, code=0).out)
    assert same["source"] == str(model)
    assert (same["same tokens"], same["cosine"]) == ("in 10 of 10 sentences", "1.000000 at least, 1.000000 on average")
    assert "name it first" in run("models", "--source", model, code=2).err
