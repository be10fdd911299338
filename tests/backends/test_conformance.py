"""Both backends give the same results: each cell of the table of tasks in docs/models.md, pipelines and heads."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from docs.site.models import COLUMNS, ERRORS, cell
from tests.native.recorded import FILE, recorded
from tests.results import Values, values
from tests.tiny import FAMILIES, TEXTS, Dense, LayerNorm, Layout, Normalize, Pooling, write_checkpoint
from tests.tiny.columns import options, row_of, writer
from tests.tiny.heads import (
    write_m3,
    write_pylate,
    write_reward,
    write_splade,
    write_stanford,
)
from tests.tiny.layouts import OLD_MODES

from millpond import Engine, TokenIds
from millpond.backends.native.families import has_plan
from millpond.checkpoints.architectures import ARCHITECTURES
from millpond.errors import MillpondError, ModelLoadError, UnsupportedArchitectureError
from millpond.native import library

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(library.kernel_table() is None, reason="no compiled kernels"),
]

TOLERANCE = 1e-5
VISIBLE = 1e-3
# The task that a checkpoint of each column is for.
TASKS = {
    "embedder": "embed",
    "classifier": "classify",
    "cross-encoder": "score",
    "token classifier": "token_classify",
    "reward model": "reward",
    "late interaction": "score",
    "LLM reranker": "score",
    "SPLADE": "sparse_embed",
}
WIDE = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96}

Writer = Callable[[Path], Path]


def difference(found: Values, expected: Values) -> float:
    """The largest difference, relative to a task's largest number if that is more than 1."""
    assert found.keys() == expected.keys()
    worst = 0.0
    for task, rows in expected.items():
        assert [row.shape for row in found[task]] == [row.shape for row in rows], task
        scale = max(1.0, *(float(np.abs(row).max(initial=0)) for row in rows))
        for own, row in zip(found[task], rows, strict=True):
            worst = max(worst, float(np.abs(own - row).max(initial=0)) / scale)
    return worst


@contextmanager
def both(folder: Path, **options: Any) -> Iterator[tuple[Engine, Engine]]:
    options = {"dtype": "float32", "device": "cpu"} | options
    with Engine(folder, backend="native", **options) as native, Engine(folder, backend="torch", **options) as reference:
        yield native, reference


def assert_same(folder: Path, **options: Any) -> frozenset[str]:
    with both(folder, **options) as (native, reference):
        assert native.tasks == reference.tasks
        expected = values(reference)
        assert difference(values(native), expected) <= TOLERANCE
        alone = values(native, TEXTS[:1])
        for task in alone.keys() - {"score"}:  # each text as in any batch
            assert np.abs(alone[task][0] - expected[task][0]).max(initial=0) <= TOLERANCE * 10
        return frozenset(native.tasks)


# --- Families -------------------------------------------------------------------------------------------------------

FIRST = {row_of(family).prefix: family for family in reversed(FAMILIES)}.values()  # of each row of the table


@pytest.mark.parametrize(
    ("family", "column"),
    [(family, column) for family in FAMILIES for column in COLUMNS if family in FIRST or column == "embedder"],
)
def test_a_cell_of_the_table(family, column, tmp_path):
    folder = writer(family, column)(tmp_path / family / "model")
    said, given = cell(row_of(family), column), options(column)
    if said == "native":
        assert TASKS[column] in assert_same(folder, **given)
        return
    if said == "torch":
        with pytest.raises(ModelLoadError, match="no native plan"):
            Engine(folder, device="cpu", backend="native", **given)
        with Engine(folder, device="cpu", dtype="float32", **given) as engine:
            assert TASKS[column] in values(engine)
    else:
        with pytest.raises(
            UnsupportedArchitectureError,
            match="SPLADE runs over|is an encoder|global attention|decoder's states|does not have",
        ):
            Engine(folder, device="cpu", **given)


def test_what_was_recorded_is_what_the_references_say(minilm_folder, tmp_path):
    """``tests/native/test_recorded.py`` compares with it where torch is absent."""
    expected = json.loads(FILE.read_text(encoding="utf-8"))
    found = recorded(minilm_folder, tmp_path)
    assert found.keys() == expected.keys()
    for name, tasks in expected.items():
        assert found[name] == {task: pytest.approx(numbers, abs=2e-6) for task, numbers in tasks.items()}, name


def test_the_table_has_every_family():
    assert {row_of(family) for family in FAMILIES} == set(ARCHITECTURES)
    errors = json.loads(ERRORS.read_text(encoding="utf-8"))
    assert {prefix: set(found) for prefix, found in errors.items()} == {
        row.prefix: {"native", "torch"} if has_plan(row) else {"torch"} for row in ARCHITECTURES
    }, "run python -m tests.parity.measured FAMILY"


# --- Pipelines and heads --------------------------------------------------------------------------------------------


def pipeline(*modules: Any, **options: Any) -> Writer:
    return partial(write_checkpoint, sentence_transformers=Layout(modules=modules), config=WIDE, **options)


HEADED: dict[str, Writer] = {
    **{mode: pipeline(Pooling(modes=(mode,))) for mode in OLD_MODES},
    "concatenated": pipeline(Pooling(modes=tuple(OLD_MODES), include_prompt=False), Dense(out_features=12)),
    "dense-norm": pipeline(Pooling(), Dense(out_features=33, activation="GELU"), LayerNorm(), Normalize()),
    "stanford-colbert": write_stanford,
    "pylate-colbert": partial(write_pylate, family="bert", widths=(40, 24)),
    "bge-m3": write_m3,
    "splade-sum": partial(write_splade, strategy="sum"),
    **{
        name: partial(write_reward, architecture=name)
        for name in ("InternLM2ForRewardModel", "Qwen2ForRewardModel", "Qwen2ForProcessRewardModel")
    },
}


@pytest.mark.parametrize("name", HEADED)
def test_a_head(name, tmp_path):
    assert_same(HEADED[name](tmp_path / "model"))


def test_another_head_gives_other_results(tmp_path):
    """Otherwise the tests above could not fail."""
    first, second = (
        write_checkpoint(tmp_path / str(seed), "bert", head="SequenceClassification", config=WIDE, seed=seed)
        for seed in (0, 1)
    )
    with both(first) as (native, _), both(second) as (_, reference):
        assert difference(values(native), values(reference)) > VISIBLE


# --- Wrong input ----------------------------------------------------------------------------------------------------

WRONG: dict[str, Callable[[Engine], Any]] = {
    "a token past the vocabulary": lambda engine: engine.embed([TokenIds((5, 100_000))]),
    "a negative token": lambda engine: engine.embed([TokenIds((-1,))]),
    "no tokens": lambda engine: engine.embed([TokenIds(())]),
    "a text that is none": lambda engine: engine.embed([None]),  # type: ignore[list-item]
    "too many dimensions": lambda engine: engine.embed(["a"], dimensions=4096),
    "a task that it lacks": lambda engine: engine.classify(["a"]),
    "an adapter that it lacks": lambda engine: engine.encode(["a"], task="retrieval.query"),
    "a text that is too long": lambda engine: engine.embed([TokenIds(tuple([7] * 500))], truncate=False),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_refused_in_the_same_words(name, tmp_path_factory, checkpoint_of):
    folder = checkpoint_of("bert", config=WIDE)
    errors = []
    with both(folder) as engines:
        for engine in engines:
            with pytest.raises((MillpondError, TypeError, ValueError)) as refused:
                WRONG[name](engine)
            errors.append((refused.type, str(refused.value)))
            assert len(engine.embed(["a"]).embeddings) == 1  # it still serves
    assert errors[0] == errors[1]
