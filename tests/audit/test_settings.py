"""The identification table: for checkpoints of several families, the setting that made the vectors is the one found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.audit.corpus import records
from tests.audit.memory import MemoryCollection
from tests.tiny import Dense, Layout, Normalize, Pooling

from millpond import Engine, PoolingParams
from millpond.audit.audit import AuditOptions, audit
from millpond.audit.candidates import Models
from millpond.audit.report import AuditReport
from millpond.vectors.quantization import eight_bits, quantize

PROMPTS = {"query": "find: ", "document": "keep: ", "cluster": "group: "}
PLAIN = Layout(modules=(Pooling(), Normalize()), prompts=PROMPTS)
LAYOUTS = {
    "bert": PLAIN,
    "roberta": Layout(modules=(Pooling(modes=("cls",)), Normalize()), prompts=PROMPTS),
    "modernbert": Layout(modules=(Pooling(), Dense(out_features=32)), prompts=PROMPTS),
    "qwen3": Layout(modules=(Pooling(modes=("lasttoken",)), Normalize()), prompts=PROMPTS),
    "nomic": PLAIN,
    "gemma3": PLAIN,
    "deberta-v2": PLAIN,
}
FLOAT32 = {"dtype": "float32", "device": "cpu"}
ROWS = records(48)


@dataclass(frozen=True, kw_only=True)
class Case:
    """How vectors are made, and what an audit must say of it."""

    options: dict[str, Any] = field(default_factory=dict)  # of the request
    engine: dict[str, Any] = field(default_factory=dict)
    text: Callable[[Any], str] = lambda row: row.text
    store: Callable[[np.ndarray], np.ndarray] = lambda rows: rows
    normalize: bool = True
    says: dict[str, str] = field(default_factory=dict)


def _half(rows: np.ndarray) -> np.ndarray:
    return rows[:, : rows.shape[1] // 2]


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def _bfloat16(rows: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(rows).view(np.uint32) & 0xFFFF0000).view(np.float32)


CASES = {
    "as documents": Case(options={"role": "document"}, says={"prompt": "keep: ", "datatype": "float32"}),
    "as queries": Case(options={"role": "query"}, says={"prompt": "find: "}),
    "with another prompt": Case(options={"prompt_name": "cluster"}, says={"prompt": "group: "}),
    "without a prompt": Case(options={"prompt": ""}, says={"prompt": ""}),
    "with a prompt of one's own": Case(options={"prompt": "Passage: "}, says={"prompt": "Passage: "}),
    "cls": Case(engine={"pooling": "cls"}, options={"role": "document"}, says={"pooling": "cls"}),
    "mean": Case(engine={"pooling": "mean"}, options={"role": "document"}, says={"pooling": "mean"}),
    "last token": Case(engine={"pooling": "lasttoken"}, options={"role": "document"}, says={"pooling": "lasttoken"}),
    "cut at 32": Case(options={"role": "document", "truncate_prompt_tokens": 32}, says={"max_length": "32"}),
    "cut at 64": Case(options={"role": "document"}, says={"max_length": "64"}),
    "lower case": Case(text=lambda row: row.text.lower(), options={"role": "document"}, says={"text": "lower case"}),
    "title": Case(
        text=lambda row: f"{row.metadata['title']}. {row.text}",
        options={"role": "document"},
        says={"text": "title, full stop, text"},
    ),
    "not normalized": Case(normalize=False, options={"role": "document"}, says={"length": "not normalized"}),
    "cut and normalized": Case(
        store=lambda rows: _unit(_half(rows)),
        options={"role": "document"},
        says={"length": "normalized", "used": "half"},
    ),
    "only cut": Case(store=_half, options={"role": "document"}, says={"length": "normalized before it was cut"}),
    "padded": Case(
        store=lambda rows: np.concatenate([rows, np.zeros_like(rows)], axis=1),
        options={"role": "document"},
        says={"used": "all"},
    ),
    "float16": Case(
        store=lambda rows: rows.astype(np.float16), options={"role": "document"}, says={"datatype": "float16"}
    ),
    "bfloat16": Case(store=_bfloat16, options={"role": "document"}, says={"datatype": "bfloat16"}),
    "int8": Case(store=lambda rows: eight_bits(rows, "int8"), options={"role": "document"}, says={"datatype": "int8"}),
    "uint8": Case(
        store=lambda rows: eight_bits(rows, "uint8"), options={"role": "document"}, says={"datatype": "uint8"}
    ),
    "signs": Case(store=lambda rows: rows > 0, options={"role": "document"}, says={"datatype": "binary"}),
    "packed signs": Case(
        store=lambda rows: quantize(rows, "ubinary"), options={"role": "document"}, says={"datatype": "uint8"}
    ),
    "a query prompt, cls and a title": Case(
        engine={"pooling": "cls"},
        options={"role": "query"},
        text=lambda row: f"{row.metadata['title']}: {row.text}",
        says={"pooling": "cls", "prompt": "find: ", "text": "title, colon, text"},
    ),
}


@pytest.fixture(scope="module")
def checkpoints(checkpoint_of: Callable[..., Path]) -> dict[str, Path]:
    return {name: checkpoint_of(name, sentence_transformers=layout) for name, layout in LAYOUTS.items()}


@pytest.fixture(scope="module")
def models_of(checkpoints: dict[str, Path]) -> Iterator[Callable[..., Models]]:
    """The models of an audit, whose engines the cases of a family share."""
    known: dict[tuple[str, ...], Models] = {}

    def models(*names: str) -> Models:
        if names not in known:
            folders = [str(checkpoints[name]) for name in names]
            known[names] = Models(folders, settings=FLOAT32, prompts=["Passage: "])
        return known[names]

    yield models
    for each in known.values():
        each.close()


def vectors_of(engine: Engine, case: Case) -> np.ndarray:
    params = PoolingParams(normalize=case.normalize, **case.options)
    rows = engine.submit("embed", [case.text(row) for row in ROWS], params).result().embeddings
    return np.asarray(case.store(np.array(rows)), dtype=np.float32)


def look(models: Models, vectors: np.ndarray, **options: Any) -> AuditReport:
    fields = [{"text": row.text, "metadata": dict(row.metadata)} for row in ROWS]
    return audit(MemoryCollection(vectors, fields), models, AuditOptions(**options))  # type: ignore[arg-type]


def check(report: AuditReport, says: dict[str, str], folder: Path, dimensions: int) -> None:
    found, setting = report.to_json(), report.found.setting
    assert setting is not None, report.found
    assert setting.model == str(folder) and report.clean and report.bounds.rows == len(ROWS), report.findings
    said = {**found["setting"], "max_length": str(setting.max_length)}
    said["used"] = {dimensions: "all", dimensions // 2: "half"}.get(said["dimensions"], said["dimensions"])
    assert {name: said[name] for name in says} == says


@pytest.mark.parametrize("name", CASES)
def test_each_setting_is_found(name: str, checkpoints: dict[str, Path], engine_of: Any, models_of: Any):
    case = CASES[name]
    engine = engine_of(checkpoints["bert"], **case.engine)
    report = look(models_of("roberta", "bert"), vectors_of(engine, case))
    check(report, case.says, checkpoints["bert"], 48)


@pytest.mark.parametrize("family", [name for name in LAYOUTS if name != "bert"])
def test_the_settings_of_each_family_are_found(
    family: str, checkpoints: dict[str, Path], engine_of: Any, models_of: Any
):
    models = models_of("bert", family)
    for name in ("as documents", "as queries", "cls", "mean", "last token", "cut at 32", "not normalized"):
        case = CASES[name]
        engine = engine_of(checkpoints[family], **case.engine)
        report = look(models, vectors_of(engine, case))
        check(report, case.says, checkpoints[family], engine.spec.dimensions)


def test_what_no_model_made_is_by_none(models_of: Any):
    noise = np.random.default_rng(1).standard_normal((len(ROWS), 48))
    for vectors in (noise, noise > 0, np.rint(40 * noise), noise[:, :20]):
        report = look(models_of("roberta", "bert"), vectors)
        assert report.found.setting is None and not report.clean and report.found.nearest is not None
    wide = look(models_of("roberta", "bert"), np.random.default_rng(1).standard_normal((len(ROWS), 50)))
    assert wide.found.setting is None and wide.found.tried == 0 and dict(wide.facts())["made by"].startswith("none")


def test_half_by_another_model_is_named(checkpoints: dict[str, Path], engine_of: Any, models_of: Any):
    case = CASES["as documents"]
    own, other = (vectors_of(engine_of(checkpoints[name]), case) for name in ("bert", "roberta"))
    for half in (10, 23):
        report = look(models_of("roberta", "bert"), np.concatenate([other[:half], own[half:]]))
        assert report.found.setting is not None and report.found.setting.model == str(checkpoints["bert"])
        assert [each.fault for each in report.findings] == ["model"] * half
        assert {each.detail for each in report.findings} == {str(checkpoints["roberta"])}
        assert report.bounds.low == report.bounds.high == half / len(ROWS)


def test_a_sample_says_how_sure_it_is(checkpoints: dict[str, Path], engine_of: Any, models_of: Any):
    vectors = vectors_of(engine_of(checkpoints["bert"]), CASES["as documents"])
    report = look(models_of("roberta", "bert"), vectors, sample=24)
    assert report.clean and report.bounds.rows == 24 < report.bounds.total and 0 < report.bounds.high < 0.6
    assert "24 drawn at random" in report.share
    every = look(models_of("roberta", "bert"), vectors, sample=24, every=True)
    assert every.recomputed == len(ROWS) and every.bounds.high == 0


def test_a_collection_that_is_not_normalized_has_rows_that_are(
    checkpoints: dict[str, Path], engine_of: Any, models_of: Any
):
    vectors = vectors_of(engine_of(checkpoints["bert"]), CASES["not normalized"])
    vectors[3] /= np.linalg.norm(vectors[3])
    vectors[4, 0] = np.inf
    report = look(models_of("bert"), vectors)
    assert [(each.id, each.fault) for each in report.findings] == [("3", "length"), ("4", "not finite")]
    assert report.findings[0].detail.endswith("normalized") and report.length == "not normalized"


def test_an_empty_collection_is_clean(models_of: Any):
    report = audit(MemoryCollection(np.zeros((0, 48)), []), models_of("bert"))  # type: ignore[arg-type]
    assert report.clean and report.bounds.total == 0 and dict(report.facts())["rows"] == "0"


def test_the_models_are_closed(checkpoints: dict[str, Path]):
    with closing(Models([str(checkpoints["bert"])], settings=FLOAT32)) as models:
        look(models, np.zeros((len(ROWS), 48)))


@pytest.mark.parametrize("limit", [41, 50, 63])
def test_a_length_that_nobody_usually_chooses_is_searched_for(
    limit: int, checkpoints: dict[str, Path], engine_of: Any, models_of: Any
):
    case = Case(options={"role": "document", "truncate_prompt_tokens": limit})
    report = look(models_of("roberta", "bert"), vectors_of(engine_of(checkpoints["bert"]), case))
    check(report, {"max_length": str(limit)}, checkpoints["bert"], 48)
