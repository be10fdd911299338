"""mteb's own evaluation of millpond's models and of sentence-transformers', on tasks made of files, without network."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from numbers import Real
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mteb
import numpy as np
import pytest
from mteb.models.instruct_wrapper import InstructSentenceTransformerModel
from mteb.models.model_implementations import MODEL_REGISTRY
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer, SparseEncoder
from tests.doors.data import write_beir, write_pairs
from tests.tiny import Layout, Pooling
from tests.tiny.heads import write_cross_encoder, write_pylate, write_splade, write_stanford

from millpond import Engine
from millpond.errors import InvalidRequestError, SourceNotFoundError, UnsupportedTaskError
from millpond.mteb import (
    MillpondCrossEncoder,
    MillpondEncoder,
    MillpondLateInteraction,
    MillpondSparseEncoder,
    beir_task,
    evaluate,
    model_of,
    sts_task,
)
from millpond.mteb.choice import find_tasks
from millpond.mteb.prompts import listed_options

pytestmark = pytest.mark.door

TOLERANCE, VISIBLE = 1e-4, 1e-2
DATA = os.environ.get("MILLPOND_DATA")
EngineOf = Callable[..., Engine]
CheckpointOf = Callable[..., Path]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    print(f"mteb {version('mteb')}")
    return write_beir(tmp_path_factory.mktemp("data") / "mill")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("data") / "pairs.tsv")


class Evaluated:
    """The scores of a model on a task, and those of each pair of texts."""

    def __init__(self, model: Any, task: Any, place: Path) -> None:
        result = mteb.evaluate(model, task, cache=None, prediction_folder=place, show_progress_bar=False)
        (found,) = result.task_results
        (scores,) = found.scores["test"]
        self.scores = {name: value for name, value in scores.items() if isinstance(value, Real)}
        self.file = place / task.prediction_file_name
        (self.pairs,) = json.loads(self.file.read_text())["default"].values()

    def difference(self, other: Evaluated) -> float:
        """The largest difference of a score, or of the similarity of two texts, relative to a large similarity."""
        assert self.scores.keys() == other.scores.keys() and self.pairs.keys() == other.pairs.keys()
        scores = [abs(self.scores[name] - other.scores[name]) for name in self.scores]
        both = []
        for name, row in self.pairs.items():
            keys = row if isinstance(row, dict) else range(len(row))
            assert len(row) == len(other.pairs[name])
            both += [(row[key], other.pairs[name][key]) for key in keys]
        scale = max(1.0, *(abs(right) for _, right in both))
        return float(np.nanmax([*scores, *(abs(left - right) / scale for left, right in both)]))


Run = Callable[[Any, Any], Evaluated]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Evaluates a model on a task, without a cache."""
    places = iter(range(100))
    return lambda model, task: Evaluated(model, task, tmp_path / f"run-{next(places)}")


# ---------------------------------------------------------------------------------------------------------- embedders


def test_minilm_has_the_scores_of_sentence_transformers(
    run: Run, folder: Path, pairs: Path, minilm_folder: Path, record_property: Callable[[str, Any], None]
):
    ours = MillpondEncoder(str(minilm_folder), device="cpu", dtype="float32")
    theirs = SentenceTransformer(str(minilm_folder), device="cpu")
    for task in (beir_task(folder), sts_task(pairs)):
        difference = run(ours, task).difference(run(theirs, task))
        record_property(task.metadata.name, difference)
        assert difference <= TOLERANCE
    retrieved = run(ours, beir_task(folder))
    assert 0.5 < retrieved.scores["ndcg_at_10"] < 1 and len(retrieved.pairs) == 5
    cut = MillpondEncoder(str(minilm_folder), device="cpu", dtype="float32", max_length=4)
    assert run(cut, beir_task(folder)).difference(retrieved) > VISIBLE


@pytest.mark.skipif(DATA is None, reason="MILLPOND_DATA is not set")
@pytest.mark.parametrize(
    "name", ["adi", "stsb/sts-test.tsv", pytest.param("cranfield", marks=[pytest.mark.slow, pytest.mark.timeout(1200)])]
)
def test_minilm_on_real_data(run: Run, name: str, minilm_folder: Path, record_property: Callable[[str, Any], None]):
    path = Path(str(DATA)) / name
    task = beir_task(path) if path.is_dir() else sts_task(path)
    ours = run(MillpondEncoder(str(minilm_folder), device="cpu", dtype="float32"), task)
    theirs = run(SentenceTransformer(str(minilm_folder), device="cpu"), task)
    record_property("scores", (ours.scores["main_score"], theirs.scores["main_score"]))
    for metric, score in theirs.scores.items():
        if not metric.startswith("nauc"):
            assert ours.scores[metric] == pytest.approx(score, abs=TOLERANCE), metric


PROMPTS = {"query": "find: ", "document": "keep: ", "STS": "compare: ", "passage": "never: "}


@pytest.mark.parametrize(
    "layout",
    [
        Layout(prompts=PROMPTS),
        Layout(prompts=PROMPTS, default_prompt_name="document"),
        Layout(prompts={"query": "find: "}),
        Layout(prompts={"web": "on the web: ", "passage": "never: "}, default_prompt_name="web"),
        Layout(prompts={"SciFact": "at the mill: ", "SciFact-query": "ask at the mill: ", "Retrieval": "never: "}),
        Layout(prompts={"Retrieval": "keep: ", "Retrieval-query": "find: ", "query": "never: "}),
        Layout(modules=(Pooling(include_prompt=False),), prompts=PROMPTS),
        Layout(),
    ],
    ids=["all", "default", "query", "named", "task", "type", "left out of pooling", "none"],
)
def test_prompts_are_those_of_mtebs_wrapper(run: Run, pairs: Path, checkpoint_of, engine_of, tmp_path, layout):
    folder = write_beir(tmp_path / "SciFact")  # the wrapper knows the names of mteb's own tasks only
    path = checkpoint_of("bert", sentence_transformers=layout)
    ours, theirs = MillpondEncoder(engine=engine_of(path)), SentenceTransformer(str(path), device="cpu")
    for task in (beir_task(folder), sts_task(pairs)):
        assert run(ours, task).difference(run(theirs, task)) <= TOLERANCE
    if layout.prompts:
        without = MillpondEncoder(engine=engine_of(path), model_prompts={"query": "", "document": "", "STS": ""})
        differences = [run(without, task).difference(run(ours, task)) for task in (beir_task(folder), sts_task(pairs))]
        assert max(differences) > VISIBLE


@pytest.mark.parametrize("prompts", [{"query": "ask: "}, {"Retrieval-document": "a: ", "STS": "b: "}])
def test_prompts_of_the_caller_replace_them(run: Run, folder: Path, pairs: Path, checkpoint_of, engine_of, prompts):
    path = checkpoint_of("bert", sentence_transformers=Layout(prompts=PROMPTS))
    theirs = mteb.SentenceTransformerEncoderWrapper(
        SentenceTransformer(str(path), device="cpu"), model_prompts=dict(prompts)
    )
    ours = MillpondEncoder(engine=engine_of(path), model_prompts=prompts)
    for task in (beir_task(folder), sts_task(pairs)):
        assert run(ours, task).difference(run(theirs, task)) <= TOLERANCE


@pytest.mark.parametrize("passages", [True, False])
def test_instructions_are_those_of_mtebs_wrapper(
    run: Run, folder: Path, pairs: Path, checkpoint_of, engine_of, passages
):
    path = checkpoint_of("bert", sentence_transformers=Layout(prompts=PROMPTS, default_prompt_name="query"))
    options: dict[str, Any] = {
        "instruction_template": "Instruct: {instruction} Query: ",
        "apply_instruction_to_passages": passages,
        "prompts_dict": {"pairs": "find the same"},
    }
    theirs = InstructSentenceTransformerModel(str(path), revision=None, device="cpu", **options)
    theirs.mteb_model_meta = mteb.get_model_meta("sentence-transformers/all-MiniLM-L6-v2")
    ours = MillpondEncoder(engine=engine_of(path), **options)
    for task in (beir_task(folder), sts_task(pairs)):
        assert run(ours, task).difference(run(theirs, task)) <= TOLERANCE
    assert (
        run(MillpondEncoder(engine=engine_of(path)), beir_task(folder)).difference(run(ours, beir_task(folder)))
        > VISIBLE
    )


@pytest.mark.parametrize("similarity", ["dot", "euclidean", "manhattan"])
def test_the_similarity_is_the_checkpoints(run: Run, folder: Path, pairs: Path, tmp_path: Path, similarity: str):
    from tests.tiny import edit_json, write_checkpoint

    path = write_checkpoint(tmp_path / "model", "bert", sentence_transformers=Layout())
    edit_json(path / "config_sentence_transformers.json", similarity_fn_name=similarity)
    ours = MillpondEncoder(str(path), device="cpu", dtype="float32")
    theirs = SentenceTransformer(str(path), device="cpu")
    assert theirs.similarity_fn_name == similarity
    found = run(ours, beir_task(folder))
    assert found.difference(run(theirs, beir_task(folder))) <= TOLERANCE
    assert set(run(ours, sts_task(pairs)).pairs) > {"similarity_scores"}  # where mteb's own wrapper knows no distances
    left, right = np.random.default_rng(0).normal(size=(2, 5, 48)).astype(np.float32)
    for name in ("similarity", "similarity_pairwise"):
        expected = getattr(theirs, name)(left, right)
        np.testing.assert_allclose(getattr(ours, name)(left, right), expected, rtol=1e-5, atol=1e-4)
        assert np.abs(getattr(ours, name)(left, 2 * right) - expected.numpy()).max() > VISIBLE  # no cosine


def test_a_width_and_a_datatype_are_the_engines(run: Run, folder: Path, minilm_folder: Path, engine_of: EngineOf):
    engine = engine_of("minilm", hf_overrides={"is_matryoshka": True})
    narrow = MillpondEncoder(engine=engine, embed_dim=64)
    theirs = SentenceTransformer(str(minilm_folder), device="cpu", truncate_dim=64)
    assert run(narrow, beir_task(folder)).difference(run(theirs, beir_task(folder))) <= TOLERANCE
    assert narrow.mteb_model_meta.experiment_kwargs == {"embed_dim": 64, "hf_overrides": {"is_matryoshka": True}}
    assert narrow.mteb_model_meta.embed_dim == 64
    result = mteb.evaluate(
        narrow, beir_task(folder), cache=None, encode_kwargs={"precision": "int8"}, show_progress_bar=False
    )
    assert 0.3 < result.task_results[0].get_score() < 1


def test_mteb_loads_the_class_by_its_metadata(run: Run, folder: Path, minilm_folder: Path):
    listed = mteb.get_model_meta("sentence-transformers/all-MiniLM-L6-v2")
    meta = listed.model_copy(update={"loader": MillpondEncoder, "name": str(minilm_folder), "revision": None})
    model = meta.load_model(device="cpu", model_kwargs={"torch_dtype": "float32"})
    theirs = SentenceTransformer(str(minilm_folder), device="cpu")
    assert run(model, beir_task(folder)).difference(run(theirs, beir_task(folder))) <= TOLERANCE
    with pytest.raises(ValueError, match="trust"):
        MillpondEncoder(str(minilm_folder), trust="me")


def test_a_published_name_gets_the_prompts_of_mtebs_list(engine_of: EngineOf, caplog: pytest.LogCaptureFixture):
    spec = engine_of("minilm").spec
    assert listed_options(spec) == {}  # a folder
    e5 = listed_options(replace(spec, name="intfloat/e5-base-v2"))
    assert e5["model_prompts"] == MODEL_REGISTRY["intfloat/e5-base-v2"].loader_kwargs["model_prompts"]
    instruct = listed_options(replace(spec, name="intfloat/multilingual-e5-large-instruct"))
    assert set(instruct) == {"instruction_template", "apply_instruction_to_passages"}
    assert not caplog.records
    assert listed_options(replace(spec, name="Qwen/Qwen3-Embedding-0.6B")) == {}
    assert "whose prompts millpond does not know" in caplog.text


# --------------------------------------------------------------------------------- search by other results, reranking

SEARCHES: dict[str, tuple[Any, Any, Any]] = {
    "stanford": (write_stanford, MillpondLateInteraction, MultiVectorEncoder),
    "pylate": (write_pylate, MillpondLateInteraction, MultiVectorEncoder),
    "splade": (write_splade, MillpondSparseEncoder, SparseEncoder),
}


@pytest.fixture(scope="module", params=SEARCHES)
def searched(request: pytest.FixtureRequest, checkpoint_of: CheckpointOf, engine_of: EngineOf) -> tuple[Any, Any]:
    """A model of ours and sentence-transformers' own."""
    write, ours, theirs = SEARCHES[request.param]
    return ours(engine=engine_of(write)), theirs(str(checkpoint_of(write)), device="cpu")


def test_a_search_has_the_scores_of_sentence_transformers(run: Run, folder: Path, searched: tuple[Any, Any]):
    ours, theirs = searched
    found = run(ours, beir_task(folder))
    assert found.difference(run(theirs, beir_task(folder))) <= TOLERANCE
    assert type(model_of(ours.engine)) is type(ours)
    ours.corpus_chunk_size = 5
    assert run(ours, beir_task(folder)).difference(found) <= TOLERANCE
    ours._encode = lambda texts, role, **options: type(ours)._encode(ours, texts, "document", **options)
    try:
        other = run(ours, beir_task(folder))
        if isinstance(ours, MillpondLateInteraction):  # queries that are read as documents
            assert other.difference(found) > VISIBLE
    finally:
        del ours._encode, ours.corpus_chunk_size


def test_a_search_ranks_what_a_task_lists(run: Run, folder: Path, searched: tuple[Any, Any], engine_of: EngineOf):
    ours, theirs = searched
    first = run(MillpondEncoder(engine=engine_of("minilm")), beir_task(folder))
    ours.corpus_chunk_size = 5
    task = beir_task(folder)
    type(task).metadata = task.metadata.model_copy(update={"type": "Reranking"})  # mteb's wrapper goes by the type
    try:
        rows = [run(model, task.convert_to_reranking(first.file, top_k=4)) for model in (ours, theirs)]
    finally:
        del ours.corpus_chunk_size
    assert rows[0].difference(rows[1]) <= TOLERANCE
    assert {len(found) for found in rows[0].pairs.values()} == {4}
    assert rows[0].scores != run(ours, beir_task(folder)).scores


def test_rows_that_a_checkpoint_does_not_normalize_stay_so(run: Run, folder: Path, tmp_path: Path):
    MultiVectorEncoder(str(write_pylate(tmp_path / "pylate")), device="cpu").save(str(tmp_path / "raw"))
    modules = tmp_path / "raw" / "modules.json"
    kept = [entry for entry in json.loads(modules.read_text()) if "Normalize" not in entry["type"]]
    modules.write_text(json.dumps(kept))
    with Engine(tmp_path / "raw", device="cpu", dtype="float32") as engine:
        ours = run(MillpondLateInteraction(engine=engine), beir_task(folder))
    theirs = run(MultiVectorEncoder(str(tmp_path / "raw"), device="cpu"), beir_task(folder))
    scale = max(max(map(abs, row.values())) for row in theirs.pairs.values())
    assert scale > 20 and ours.difference(theirs) <= TOLERANCE


def test_a_cross_encoder_has_the_scores_of_sentence_transformers(
    run: Run, folder: Path, checkpoint_of: CheckpointOf, engine_of: EngineOf, monkeypatch: pytest.MonkeyPatch
):
    first = run(MillpondEncoder(engine=engine_of("minilm")), beir_task(folder))
    task = beir_task(folder).convert_to_reranking(first.file, top_k=6)
    ours = model_of(engine_of(write_cross_encoder))
    assert isinstance(ours, MillpondCrossEncoder)
    found = run(ours, task)
    assert found.difference(run(CrossEncoder(str(checkpoint_of(write_cross_encoder)), device="cpu"), task)) <= TOLERANCE
    monkeypatch.setattr("millpond.mteb.cross_encoder._PAIRS", 4)
    assert run(ours, task).difference(found) <= TOLERANCE
    score = ours.engine.score
    monkeypatch.setattr(ours.engine, "score", lambda queries, documents: score(documents, queries))
    assert run(ours, task).difference(found) > VISIBLE


def test_a_class_refuses_another_kind_of_checkpoint(engine_of: EngineOf):
    for kind, other in (
        (MillpondEncoder, write_splade),
        (MillpondSparseEncoder, "minilm"),
        (MillpondLateInteraction, write_cross_encoder),
        (MillpondCrossEncoder, "minilm"),
    ):
        with pytest.raises(UnsupportedTaskError, match="model_of chooses"):
            kind(engine=engine_of(other))


# -------------------------------------------------------------------------------------------- evaluate(), and its files


def test_results_are_mtebs_files_and_are_not_computed_again(folder: Path, tmp_path: Path, engine_of: EngineOf):
    data = tmp_path / "mill"
    data.mkdir()
    for file in folder.rglob("*.*"):
        (data / file.relative_to(folder)).parent.mkdir(exist_ok=True)
        (data / file.relative_to(folder)).write_bytes(file.read_bytes())
    model, output = MillpondEncoder(engine=engine_of("minilm")), tmp_path / "results"
    (row,) = evaluate(model, beir_task(data), output=output)
    assert (row.task, row.type, row.split, row.metric) == ("mill", "Retrieval", "test", "ndcg_at_10")
    assert row.score == row.scores["ndcg_at_10"] == row.subsets["default"] and row.seconds > 0 and not row.stored
    file = output / "results" / f"local__{Path(model.engine.spec.name).name}" / model.engine.spec.fingerprint[:40]
    assert mteb.TaskResult.from_disk(file / "mill.json").get_score() == pytest.approx(row.score, abs=1e-5)
    assert json.loads((file / "model_meta.json").read_text())["loader"] == "MillpondEncoder"
    (again,) = evaluate(model, beir_task(data), output=output)
    assert again.stored and again.score == pytest.approx(row.score, abs=1e-5)
    (data / "qrels" / "test.tsv").write_text("q1\tcode\t1\n")  # other data
    (changed,) = evaluate(model, beir_task(data), output=output)
    assert not changed.stored and changed.score != row.score


def test_a_published_model_has_its_name_and_its_commit(engine_of: EngineOf):
    engine = engine_of("minilm")
    model = MillpondEncoder(engine=engine)
    spec = replace(engine.spec, name="intfloat/e5-base-v2", settings={**engine.spec.settings, "revision": "abc"})
    model.engine = SimpleNamespace(spec=spec, config=engine.config, dtype="float32")
    meta = model._meta()
    listed = MODEL_REGISTRY["intfloat/e5-base-v2"]
    assert (meta.name, meta.revision, meta.n_parameters) == (listed.name, "abc", listed.n_parameters)
    assert meta.experiment_name is None and meta.loader is MillpondEncoder and meta.max_tokens == 256


def test_options_that_change_vectors_have_results_of_their_own(minilm_folder: Path):
    with Engine(minilm_folder, device="cpu", dtype="bfloat16", max_length=64, backend="torch") as engine:
        meta = MillpondEncoder(engine=engine).mteb_model_meta
    assert meta.experiment_kwargs == {"max_length": 64, "dtype": "bfloat16"}


def test_a_first_stage_finds_what_a_reranker_ranks(run: Run, folder: Path, tmp_path: Path, engine_of: EngineOf):
    reranker, embedder = model_of(engine_of(write_cross_encoder)), MillpondEncoder(engine=engine_of("minilm"))
    with pytest.raises(InvalidRequestError, match="searches a whole corpus"):
        evaluate(reranker, beir_task(folder))
    with pytest.raises(InvalidRequestError, match="only ranks"):
        evaluate(reranker, beir_task(folder), first_stage=reranker)
    (row,) = evaluate(reranker, beir_task(folder), first_stage=embedder, candidates=4, output=tmp_path)
    first = run(embedder, beir_task(folder))
    expected = run(reranker, beir_task(folder).convert_to_reranking(first.file, top_k=4))
    assert row.score == pytest.approx(expected.scores["main_score"], abs=TOLERANCE) and row.score != first.scores
    assert [path.parent.name for path in tmp_path.rglob("mill.json")] == [
        reranker.mteb_model_meta.model_copy(
            update={"experiment_kwargs": {"candidates": 4, "first_stage": embedder.mteb_model_meta.name}}
        ).experiment_name
    ]
    assert not reranker.mteb_model_meta.experiment_kwargs
    assert evaluate(reranker, beir_task(folder), first_stage=embedder, candidates=4, output=tmp_path)[0].stored
    assert not evaluate(reranker, beir_task(folder), first_stage=embedder, candidates=5, output=tmp_path)[0].stored


def test_a_name_is_a_task_or_a_benchmark():
    assert [task.metadata.name for task in find_tasks("SciFact")] == ["SciFact"]
    english = find_tasks("MTEB(eng, v2)")
    assert len(english) > 30 and {"STS12", "ArguAna"} < {task.metadata.name for task in english}


def test_tasks_that_a_model_cannot_be_measured_on(pairs: Path, checkpoint_of: CheckpointOf, engine_of: EngineOf):
    for write in (write_stanford, write_splade, write_cross_encoder):
        with pytest.raises(InvalidRequestError, match="compares one vector of each text"):
            evaluate(model_of(engine_of(write)), sts_task(pairs))
    with pytest.raises(InvalidRequestError, match="image; millpond reads text only"):
        evaluate(model_of(engine_of("minilm")), mteb.get_task("CIFAR10Clustering"))
    with pytest.raises(UnsupportedTaskError, match="serves classify.*; mteb measures embedders"):
        model_of(engine_of(checkpoint_of("distilbert", head="SequenceClassification")))
    with pytest.raises(InvalidRequestError, match="dimensions=8 cuts the vector"):
        model_of(engine_of(write_splade), dimensions=8)


def test_data_that_is_not_here_is_named(engine_of: EngineOf, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.CRITICAL)
    for name in ("SciFact", "STS12"):
        task = mteb.get_task(name)
        with pytest.raises(SourceNotFoundError, match=f"{name}: its data .* could not be fetched"):
            evaluate(model_of(engine_of("minilm")), task)
        assert "load_data" not in vars(task)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("corpus.jsonl", '{"_id": "a", "text": "b"}\n[1]\n', "corpus.jsonl:2 is no JSON object"),
        ("queries.jsonl", '{"_id": "z", "text": "b"}\n', "has none of the queries"),
        ("qrels/test.tsv", "q1\tbread\t0.5\n", "the grade 0.5; mteb takes whole grades"),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, name: str, text: str, message: str):
    (write_beir(tmp_path / "set") / name).write_text(text)
    with pytest.raises(InvalidRequestError, match=message):
        beir_task(tmp_path / "set").load_data()


def test_folders_and_tables_that_are_none(tmp_path: Path):
    with pytest.raises(InvalidRequestError, match="is no BEIR folder: it needs corpus.jsonl"):
        beir_task(tmp_path)
    with pytest.raises(SourceNotFoundError, match="there is no file"):
        sts_task(tmp_path / "none.tsv")
    for text, message in (
        ("a\tb\n", "has no column score"),
        ("score\tsentence1\tsentence2\nx\ta\tb\n", ":2: 'x' is no"),
    ):
        (tmp_path / "pairs.tsv").write_text(text)
        with pytest.raises(InvalidRequestError, match=message):
            sts_task(tmp_path / "pairs.tsv").load_data()
    (tmp_path / "pairs.csv").write_text('score,sentence1,sentence2\n1.5,"a, b",c\n')
    task = sts_task(tmp_path / "pairs.csv")
    task.load_data()
    assert task.dataset["test"][0] == {"score": 1.5, "sentence1": "a, b", "sentence2": "c"}
