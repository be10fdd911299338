"""``score`` of an embedder compares vectors as its files say, like sentence-transformers' own ``similarity``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.tiny import TEXTS, Layout, Normalize, Pooling, edit_json, write_checkpoint

from millpond import LLM, Engine
from millpond.errors import ModelLoadError

SentenceTransformer = pytest.importorskip("sentence_transformers").SentenceTransformer
pytestmark = pytest.mark.torch

LEFT, RIGHT = TEXTS[:4], TEXTS[4:8]


def written(folder: Path, name: str | None, *modules: Pooling | Normalize) -> Path:
    write_checkpoint(folder, "bert", sentence_transformers=Layout(modules=modules))
    edit_json(folder / "config_sentence_transformers.json", similarity_fn_name=name)
    return folder


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("name", ["cosine", "dot", "euclidean", "manhattan", None])
def test_pairs_are_compared_as_the_checkpoint_says(backend: str, name: str | None, tmp_path: Path) -> None:
    folder = written(tmp_path / "model", name, Pooling())
    oracle = SentenceTransformer(str(folder), device="cpu")
    left, right = oracle.encode(LEFT), oracle.encode(RIGHT)
    expected = oracle.similarity_pairwise(left, right).numpy()
    with Engine(folder, dtype="float32", backend=backend) as engine:
        found = engine.score(LEFT, RIGHT)
        cosine = engine.score(LEFT, RIGHT, method="cosine")
        assert engine.spec.similarity == found.method == (name or "cosine")
        assert cosine.method == "cosine"
        assert engine.rerank(LEFT[0], RIGHT).method == "maxsim"
    # A product of vectors of length 10 has their errors ten times.
    assert np.abs(found.scores - expected).max() <= 1e-5 * max(1, np.linalg.norm(left, axis=1).max())
    if name not in ("cosine", None):  # the negative control: the vectors are not of length 1
        assert np.abs(found.scores - cosine.scores).min() > 0.1


def test_vectors_that_the_checkpoint_normalizes_are_compared_normalized(tmp_path: Path) -> None:
    with Engine(written(tmp_path / "model", "dot", Pooling(), Normalize()), dtype="float32") as engine:
        found, cosine = engine.score(LEFT, RIGHT), engine.score(LEFT, RIGHT, method="cosine")
        assert (found.method, cosine.method) == ("dot", "cosine")
        np.testing.assert_allclose(found.scores, cosine.scores, atol=1e-6)


@pytest.mark.parametrize("name", ["cosine", "dot", "euclidean", "manhattan"])
def test_vectors_are_cut_after_the_checkpoint_normalized_them(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "model", name, Pooling(), Normalize())
    edit_json(folder / "config_sentence_transformers.json", truncate_dim=8)
    oracle = SentenceTransformer(str(folder), device="cpu")
    left, right = oracle.encode(LEFT), oracle.encode(RIGHT)
    assert left.shape[1] == 8
    with Engine(folder, dtype="float32") as engine:
        scores = engine.score(LEFT, RIGHT).scores
        again = [engine.embed(texts).embeddings for texts in (LEFT, RIGHT)]
    assert np.abs(scores - oracle.similarity_pairwise(left, right).numpy()).max() <= 1e-5
    if name != "cosine":  # the negative control: vectors that are normalized again after the cut, as `embed` gives them
        assert np.abs(scores - oracle.similarity_pairwise(*again).numpy()).min() > 1e-2


def test_an_unknown_similarity_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="similarity_fn_name 'angular' is not known; .*cosine, dot"):
        Engine(written(tmp_path / "model", "angular", Pooling()))


def test_vllm_s_class_gives_cosines(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", "dot", Pooling())
    (scored,) = LLM(str(folder), dtype="float32").score(LEFT[0], RIGHT[0])
    with Engine(folder, dtype="float32") as engine:
        assert scored.outputs.score == pytest.approx(float(engine.score(LEFT[0], RIGHT[0], method="cosine").scores[0]))
