"""One table over both backends: every family with each of its heads gives the same results of every task in both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny import FAMILIES, TEXTS, Dense, LayerNorm, Layout, Normalize, Pooling, write_checkpoint
from tests.tiny.heads import (
    write_cross_encoder,
    write_language_model,
    write_m3,
    write_pylate,
    write_reward,
    write_splade,
    write_stanford,
)
from tests.tiny.layouts import OLD_MODES

from millpond import Engine, PoolingParams, TokenIds
from millpond.backends.native.backend import cannot_run
from millpond.engine import loading
from millpond.errors import MillpondError
from millpond.native import library
from millpond.values.config import EngineConfig

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(library.kernel_table() is None, reason="no compiled kernels"),
]

TOLERANCE = 1e-5
VISIBLE = 1e-3
# Families that have no native plan.
TORCH_ONLY = {"gpt2", "jamba"}
# Families that must run natively; of the others a test is skipped until they have a plan.
PLANNED = {"bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "electra", "deberta-v2"}
# A width that every plan takes, in the terms of each family.
WIDE = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96}
DECODER = WIDE | {"num_key_value_heads": 2, "head_dim": 32}
OWN_TERMS: Mapping[str, Mapping[str, Any]] = {
    "distilbert": {"dim": 64, "n_heads": 2, "hidden_dim": 96},
    "nomic": WIDE | {"n_embd": 64, "n_head": 2, "n_inner": 96},
    "nomic-moe": WIDE | {"n_embd": 64, "n_head": 2, "n_inner": 96},
    "electra": WIDE | {"embedding_size": 32},
    "albert": WIDE | {"embedding_size": 32},
    "deberta-v2": WIDE | {"pooler_hidden_size": 64},
    "gpt2": {},
    "jamba": {},
}
PLAIN_JINA = {"lora_adaptations": None, "matryoshka_dimensions": None}  # no adapters beside a head


def wide(family: str) -> dict[str, Any]:
    own = OWN_TERMS.get(family)
    if own is not None:
        return dict(own)
    return dict(DECODER if FAMILIES[family].head in ("ForCausalLM", "LMHeadModel") or family == "eurobert" else WIDE)


Values = dict[str, list[np.ndarray]]
Writer = Callable[[Path], Path]


def values(engine: Engine, texts: tuple[str, ...] = TEXTS) -> Values:
    """The raw results of every task, by its name."""
    found: Values = {}
    for task in sorted(engine.tasks - {"score"}):
        params = PoolingParams(activation=False) if task in ("classify", "token_classify", "reward") else None
        output: Any = engine.encode(list(texts), task=task, params=params)
        if task == "sparse_embed":
            found[task] = [_dense(row) for row in output.embeddings]
        else:
            rows = next(getattr(output, name) for name in ("embeddings", "probs", "rewards") if hasattr(output, name))
            found[task] = [np.asarray(row) for row in rows]
    if "score" in engine.tasks:
        found["score"] = [np.asarray(engine.score(list(texts[:4]), list(texts[4:8])).scores)]
    return found


def _dense(weights: Mapping[int, float]) -> np.ndarray:
    row = np.zeros(1000, np.float32)
    row[list(weights.keys())] = list(weights.values())
    return row


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
    obstacle = missing(folder, **options)
    if obstacle is not None:
        assert folder.parent.name not in PLANNED, obstacle
        pytest.skip(obstacle)
    with Engine(folder, backend="native", **options) as native, Engine(folder, backend="torch", **options) as reference:
        yield native, reference


def missing(folder: Path, **options: Any) -> str | None:
    """Why a checkpoint has no native model."""
    description, _ = loading._read(EngineConfig(model=str(folder), **options), has_weights=True)
    return cannot_run(description, EngineConfig(model=str(folder), **options))


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

NATIVE = sorted(FAMILIES.keys() - TORCH_ONLY)
HEADS = ("plain", "SequenceClassification", "TokenClassification")


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", NATIVE)
def test_a_family(family, head, tmp_path):
    config = wide(family)
    if head == "plain":
        folder = write_checkpoint(tmp_path / family / "model", family, config=config)
    else:
        try:
            folder = write_checkpoint(
                tmp_path / family / "model",
                family,
                head=head,
                labels=1 if head == "SequenceClassification" else 3,
                config=config | (PLAIN_JINA if family == "jina" else {}),
            )
        except AttributeError:
            pytest.skip("transformers has no such class")
    assert_same(folder)


@pytest.mark.parametrize("family", sorted(TORCH_ONLY))
def test_a_family_without_a_plan_runs_in_torch(family, tmp_path):
    folder = write_checkpoint(tmp_path / "model", family)
    with pytest.raises(MillpondError, match="no native plan"):
        Engine(folder, device="cpu", backend="native")
    with Engine(folder, device="cpu", dtype="float32") as engine:
        assert len(engine.embed(["a"]).embeddings) == 1


# --- Pipelines and heads --------------------------------------------------------------------------------------------


def pipeline(*modules: Any, **options: Any) -> Writer:
    return partial(write_checkpoint, sentence_transformers=Layout(modules=modules), config=WIDE, **options)


HEADED: dict[str, tuple[Writer, Mapping[str, Any]]] = {
    **{mode: (pipeline(Pooling(modes=(mode,))), {}) for mode in OLD_MODES},
    "concatenated": (pipeline(Pooling(modes=tuple(OLD_MODES), include_prompt=False), Dense(out_features=12)), {}),
    "dense-norm": (pipeline(Pooling(), Dense(out_features=33, activation="GELU"), LayerNorm(), Normalize()), {}),
    "stanford-colbert": (partial(write_stanford), {}),
    "pylate-colbert": (partial(write_pylate, family="bert", widths=(40, 24)), {}),
    "bge-m3": (write_m3, {}),
    **{
        f"splade-{family}-{strategy}": (
            partial(write_splade, family=family, strategy=strategy, config=wide(family)),
            {},
        )
        for family in ("bert", "distilbert", "roberta", "xlm-roberta", "mpnet", "modernbert")
        for strategy in ("max", "sum")
    },
    "cross-encoder": (write_cross_encoder, {}),
    **{
        name: (partial(write_reward, architecture=name), {})
        for name in ("InternLM2ForRewardModel", "Qwen2ForRewardModel", "Qwen2ForProcessRewardModel")
    },
    **{
        f"{family}-reranker": (
            partial(write_language_model, family=family, tokens=("<no>", "<yes>"), config=DECODER),
            {"hf_overrides": {"classifier_from_token": ["<no>", "<yes>"]}},
        )
        for family in ("llama", "qwen3", "gemma2")
    },
}


@pytest.mark.parametrize("name", HEADED)
def test_a_head(name, tmp_path):
    write, options = HEADED[name]
    assert_same(write(tmp_path / "model"), **options)


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
