"""The sources of adapters whose classes are no pydantic models: what they ask of the engine, and their options."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.adapter_models import cross_encoder as cross_encoder
from tests.adapter_models import cross_encoder_engine as cross_encoder_engine
from tests.adapter_models import prompted_splade as prompted_splade
from tests.adapter_models import splade_engine as splade_engine
from tests.tiny.heads import write_nli

from millpond import AsyncEngine, Engine, InvalidRequestError
from millpond.compat.composed import Classifier, Embedder, ModelSource, Scorer, SparseEmbedder
from millpond.errors import ModelLoadError

QUESTION, DOCUMENTS = "mill", ["the mill pond", "a wheel", "stones and water"]


async def test_texts_have_the_role_that_is_asked_for(prompted_splade: str, splade_engine: Engine) -> None:
    for source in (SparseEmbedder(model=prompted_splade, dtype="float32"), SparseEmbedder(engine=splade_engine)):
        rows = {role: splade_engine.sparse_embed(DOCUMENTS, role=role).embeddings for role in ("query", "document")}
        assert rows["query"] != rows["document"]
        for role, expected in rows.items():
            for found in (source.embed(DOCUMENTS, role), await source.aembed(DOCUMENTS, role)):
                assert [list(row) for row in found] == [sorted(row) for row in expected]
                assert found == [pytest.approx(row, abs=1e-5) for row in expected]
    plain = SparseEmbedder(engine=splade_engine, query_prompt="").embed(DOCUMENTS, "query")
    assert plain != source.embed(DOCUMENTS, "query")


async def test_logits_are_scaled_or_not_as_told(cross_encoder: str, cross_encoder_engine: Engine) -> None:
    logits = cross_encoder_engine.score(QUESTION, DOCUMENTS, activation=False).scores
    sigmoids = 1 / (1 + np.exp(-logits.astype(np.float64)))
    assert np.abs(logits - sigmoids).max() > 0.1
    source = Scorer(engine=cross_encoder_engine)
    for scaled, expected in ((True, sigmoids), (False, logits), (None, logits)):  # its own activation is none
        for ranked in (
            source.rank(QUESTION, DOCUMENTS, top_n=2, scaled=scaled),
            await source.arank(QUESTION, DOCUMENTS, top_n=2, scaled=scaled),
        ):
            assert [each.index for each in ranked] == np.argsort(-expected, kind="stable")[:2].tolist()
            scores = [each.relevance_score for each in ranked]
            assert scores == pytest.approx(np.sort(expected)[::-1][:2].tolist(), abs=1e-5)
    own = Scorer(model=cross_encoder, dtype="float32", activation="softmax")  # of one column: 1
    assert [each.relevance_score for each in own.rank(QUESTION, DOCUMENTS, top_n=None, scaled=True)] == [1, 1, 1]


async def test_rerank_takes_an_activation_as_score_does(
    cross_encoder_engine: Engine, engine_of: Callable[..., Engine]
) -> None:
    for activation in (False, "sigmoid", "identity", None):
        scores = cross_encoder_engine.score(QUESTION, DOCUMENTS, activation=activation).scores
        for ranked in (
            cross_encoder_engine.rerank(QUESTION, DOCUMENTS, activation=activation),
            await AsyncEngine(cross_encoder_engine).rerank(QUESTION, DOCUMENTS, activation=activation),
        ):
            assert {each.index: each.relevance_score for each in ranked} == pytest.approx(dict(enumerate(scores)))
    with pytest.raises(InvalidRequestError, match="activation"):
        engine_of("bert").rerank(QUESTION, DOCUMENTS, activation="sigmoid")


@pytest.mark.parametrize("kind", [Embedder, SparseEmbedder, Scorer])
def test_options_are_json_that_makes_an_equal_source(kind: Any, splade_engine: Engine) -> None:
    source = kind(model_name="owner/name", device=["cpu", "cpu"], max_length=9, hf_overrides={"a": [1]})
    options = json.loads(json.dumps(source.options()))
    assert kind(**options) == source and options["device"] == "cpu" and "engine" not in options
    assert source.name == "owner/name" and isinstance(source, ModelSource)
    with pytest.raises(TypeError, match="engine= cannot be serialized.*pass model= and the engine's options"):
        kind(engine=splade_engine).options()
    assert kind(engine=splade_engine).name == splade_engine.spec.name
    for wrong, message in (({}, "either model= .* or engine="), ({"model": "a", "backend": "onnx"}, "backend='onnx'")):
        with pytest.raises(ValueError, match=message):
            kind(**wrong)


TEXTS = [*DOCUMENTS, "bread", "the moon and tides", "sockets"]
LABELS = ["mills", "seas", "songs"]


def test_labels_of_your_own_are_those_that_a_text_entails_most(engine_of: Callable[..., Engine]) -> None:
    nli = engine_of(write_nli)
    probs = nli.classify(TEXTS, labels=LABELS, template="It is about {}.").probs
    expected = [LABELS[best] for best in probs.argmax(axis=1)]
    assert Classifier(engine=nli, template="It is about {}.").label(TEXTS, LABELS) == expected
    assert len(set(expected)) > 1


def test_a_label_is_the_likeliest_of_those_that_are_named(
    checkpoint_of: Callable[..., Path], engine_of: Callable[..., Engine]
) -> None:
    engine = engine_of(checkpoint_of("bert", head="SequenceClassification", labels=4))
    probs, own = engine.classify(TEXTS).probs, engine.spec.labels
    source = Classifier(engine=engine)
    assert source.label(TEXTS, own) == [own[best] for best in probs.argmax(axis=1)]
    some = [own[2], own[1]]
    assert source.label(TEXTS, some) == [some[int(row[1] > row[2])] for row in probs]
    for labels in (["mills", own[0]], []):
        with pytest.raises(InvalidRequestError, match="has the labels .*choose among them, or name a model of natural"):
            source.label(TEXTS, labels)


def test_a_description_reads_no_weights(checkpoint_of: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint_of("bert"), tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"")
    source = Embedder(model=folder, max_length=9, cache=tmp_path / "cache")
    assert (source.describe().dimensions, source.describe().max_length) == (48, 9)
    assert not (tmp_path / "cache").exists()
    with pytest.raises(ModelLoadError):
        source.load()
