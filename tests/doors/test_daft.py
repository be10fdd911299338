"""Daft's own functions over MillpondProvider: vectors are the engine's, and those of Daft's provider of today."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import daft
import numpy as np
import pytest
from daft.functions import classify_text, embed_text
from daft.session import Session
from tests.adapter_models import prompted as prompted
from tests.passages import TEXTS
from tests.tiny.heads import write_nli

from millpond import Engine
from millpond.compat.daft import MillpondProvider
from millpond.errors import InputTooLongError, InvalidRequestError, ModelLoadError

pytestmark = pytest.mark.door

QUESTION = "What makes dough rise?"
LABELS = ["baking", "sailing", "music"]


@pytest.fixture
def provider() -> Iterator[MillpondProvider]:
    """A provider that is attached to a session of its own."""
    before = daft.current_session()
    daft.set_session(Session())
    yield daft.attach_provider(MillpondProvider(dtype="float32", device="cpu"))
    daft.set_session(before)


def column(frame: Any, name: str = "vector") -> Any:
    return frame.to_pydict()[name]


def test_a_column_has_the_vectors_of_the_engine(minilm: str, provider: MillpondProvider, engine_of: Any) -> None:
    frame = daft.from_pydict({"text": TEXTS}).into_batches(5)
    frame = frame.with_column("vector", embed_text(daft.col("text"), provider="millpond", model=minilm))
    assert frame.schema()["vector"].dtype == daft.DataType.embedding(daft.DataType.float32(), 384)  # nothing ran yet
    expected = engine_of("minilm").embed(TEXTS).embeddings
    np.testing.assert_allclose(column(frame), expected, atol=1e-6)


def test_the_vectors_are_those_of_dafts_own_provider(minilm: str, provider: MillpondProvider) -> None:
    frame = daft.from_pydict({"text": TEXTS})
    for name in ("millpond", "transformers"):
        frame = frame.with_column(name, embed_text(daft.col("text"), provider=name, model=minilm))
    found = frame.to_pydict()
    np.testing.assert_allclose(found["millpond"], found["transformers"], atol=1e-5)
    cls = frame.select(embed_text(daft.col("text"), provider="millpond", model=minilm, pooling="cls").alias("vector"))
    assert np.abs(np.array(column(cls)) - found["transformers"]).max() > 1e-2  # the negative control


def test_null_stays_null(minilm: str, provider: MillpondProvider, engine_of: Any) -> None:
    for texts in ([None, TEXTS[0], None, TEXTS[1]], [None, None], []):
        frame = daft.from_pydict({"text": daft.Series.from_pylist(texts, dtype=daft.DataType.string())})
        found = column(frame.with_column("vector", embed_text(frame["text"], provider="millpond", model=minilm)))
        assert [row is None for row in found] == [text is None for text in texts]
        kept = [text for text in texts if text is not None]
        if kept:
            vectors = [row for row in found if row is not None]
            np.testing.assert_allclose(vectors, engine_of("minilm").embed(kept).embeddings, atol=1e-6)


def test_roles_have_their_prompts(prompted: str, provider: MillpondProvider, engine_of: Any) -> None:
    frame = daft.from_pydict({"text": TEXTS})
    rows = {
        role: np.array(
            column(frame.with_column("vector", embed_text(frame["text"], provider=provider, model=prompted, **options)))
        )
        for role, options in {"document": {}, "query": {"role": "query"}}.items()
    }
    for role, found in rows.items():
        np.testing.assert_allclose(found, engine_of(Path(prompted)).embed(TEXTS, role=role).embeddings, atol=1e-6)
    assert np.abs(rows["document"] - rows["query"]).max() > 1e-2


def test_several_models_and_widths_in_one_query(minilm: str, prompted: str, provider: MillpondProvider) -> None:
    cut = {"dimensions": 64, "hf_overrides": {"is_matryoshka": True}}
    frame = daft.from_pydict({"text": TEXTS})
    for name, model, options in (("one", minilm, {}), ("two", prompted, {}), ("cut", minilm, cut)):
        frame = frame.with_column(name, embed_text(frame["text"], provider="millpond", model=model, **options))
    found = {name: np.array(rows) for name, rows in frame.select("one", "two", "cut").to_pydict().items()}
    assert {name: rows.shape for name, rows in found.items()} == {"one": (12, 384), "two": (12, 384), "cut": (12, 64)}
    assert np.abs(found["one"] - found["two"]).max() > 1e-2
    shorter = found["one"][:, :64] / np.linalg.norm(found["one"][:, :64], axis=1, keepdims=True)
    np.testing.assert_allclose(found["cut"], shorter, atol=1e-6)


WORKER = """
import pickle, sys
import numpy as np
with open(sys.argv[1], "rb") as file:
    descriptor = pickle.load(file)
np.save(sys.argv[2], np.stack(descriptor.instantiate().embed_text(["Tides follow the moon."])))
"""


def test_a_descriptor_makes_its_model_in_another_process(minilm: str, tmp_path: Path, engine_of: Any) -> None:
    descriptor = MillpondProvider(dtype="float32").get_text_embedder(minilm, role="query")
    assert (descriptor.get_provider(), descriptor.get_model()) == ("millpond", minilm)
    assert descriptor.get_options()["dtype"] == "float32" and descriptor.get_udf_options().max_retries == 0
    (tmp_path / "pickled").write_bytes(pickle.dumps(descriptor))
    assert len(pickle.dumps(descriptor)) < 4000  # options, and no weights
    command = [sys.executable, "-c", WORKER, tmp_path / "pickled", tmp_path / "rows.npy"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ})
    assert run.returncode == 0, run.stderr
    expected = engine_of("minilm").embed(["Tides follow the moon."], role="query").embeddings
    np.testing.assert_allclose(np.load(tmp_path / "rows.npy"), expected, atol=1e-6)


RAY = """
import sys
import daft
from daft.functions import embed_text
from millpond.compat.daft import MillpondProvider

daft.set_runner_ray()
for options in ({}, {"concurrency": 1}):  # tasks of Ray, and an actor
    frame = daft.from_pydict({"text": [str(n) for n in range(40)]}).into_partitions(3)
    provider = MillpondProvider(dtype="float32", **options)
    vectors = frame.with_column("vector", embed_text(frame["text"], provider=provider, model=sys.argv[1]))
    found = vectors.to_pydict()
    assert sorted(found["text"], key=int) == [str(n) for n in range(40)]
    same = MillpondProvider(dtype="float32").get_text_embedder(sys.argv[1]).instantiate().embed_text(found["text"])
    assert max(abs(one - other).max() for one, other in zip(found["vector"], same)) < 1e-6
print("the same")
"""


@pytest.mark.slow
def test_workers_of_ray_load_models_of_their_own(minilm: str) -> None:
    command = [sys.executable, "-c", RAY, minilm]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ})
    assert (run.returncode, run.stdout.strip().splitlines()[-1:]) == (0, ["the same"]), run.stderr[-2000:]


def test_mistakes_are_named_before_a_query_runs(minilm: str, engine_of: Any) -> None:
    provider, text = MillpondProvider(), daft.col("text")
    for options, message in (
        ({"model": minilm, "role": "passage"}, "role='passage'"),
        ({"model": minilm, "backend": "onnx"}, "backend='onnx' is not available here"),
        ({"model": minilm, "dimensions": 64}, "dimensions=64|Matryoshka"),
        ({"model": "./no-such-folder"}, "no-such-folder"),
        ({}, "either model= .* or engine="),
        ({"engine": engine_of("minilm")}, "engine= cannot be serialized.*pass model="),
    ):
        with pytest.raises((ValueError, TypeError, ModelLoadError), match=message):
            embed_text(text, provider=provider, **options)
    with pytest.raises(NotImplementedError, match="prompt is not currently implemented for the 'millpond' provider"):
        provider.get_prompter()


def test_an_error_of_a_text_is_that_of_the_engine(minilm: str) -> None:
    provider = MillpondProvider(truncate="error", max_length=16)
    frame = daft.from_pydict({"text": ["short", "wheel " * 40]})
    with pytest.raises(InputTooLongError, match="the document at index 1 has 42 tokens, more than max_length=16"):
        frame.with_column("vector", embed_text(frame["text"], provider=provider, model=minilm)).collect()


def test_labels_of_your_own_are_those_of_dafts_own_provider(
    checkpoint_of: Callable[..., Path], provider: MillpondProvider
) -> None:
    model = str(checkpoint_of(write_nli))
    frame = daft.from_pydict({"text": [*TEXTS, None]})
    ours = column(
        frame.with_column("label", classify_text(frame["text"], LABELS, provider="millpond", model=model)), "label"
    )
    assert ours[-1] is None
    known = daft.from_pydict({"text": TEXTS})
    theirs = classify_text(known["text"], LABELS, provider="transformers", model=model)
    assert ours[:-1] == column(known.with_column("label", theirs), "label")
    assert len(set(ours[:-1])) > 1


def test_a_classifiers_own_labels_are_chosen_among(
    checkpoint_of: Callable[..., Path], provider: MillpondProvider
) -> None:
    model = checkpoint_of("bert", head="SequenceClassification", labels=4)
    with Engine(model, dtype="float32", device="cpu") as engine:
        output = engine.classify(TEXTS)
    some = [output.labels[2], output.labels[0]]
    expected = [some[int(row[0] > row[2])] for row in output.probs]
    frame = daft.from_pydict({"text": TEXTS})

    def labelled(labels: Any) -> Any:
        chosen = classify_text(frame["text"], labels, provider="millpond", model=str(model))
        return column(frame.with_column("label", chosen), "label")

    assert labelled(some) == expected
    assert labelled(list(output.labels)) == [output.labels[best] for best in output.probs.argmax(axis=1)]
    with pytest.raises(InvalidRequestError, match="labels=.*'baking'.*has the labels .*choose among them"):
        labelled(LABELS)
