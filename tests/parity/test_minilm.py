"""The real all-MiniLM-L6-v2: vectors, retrieval quality and STS Benchmark equal those of sentence-transformers."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from quality import Retrieval, evaluate, evaluate_maxsim, ids_of, mean_ndcg, read_retrieval, search

from millpond import Engine

TOLERANCE = 1e-5
# sentence-transformers 6.2 in float32 on cranfield, title + " " + text: nDCG@10 by width, cut and renormalized.
CRANFIELD = {384: 0.3736, 256: 0.362, 128: 0.344, 64: 0.281}
FORCED = {"is_matryoshka": True}  # MiniLM was not trained for narrower vectors


def retrieval(name: str) -> Retrieval:
    data = os.environ.get("MILLPOND_DATA")
    if not data:
        pytest.skip("MILLPOND_DATA is not set")
    return read_retrieval(Path(data) / name)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """All texts of the adi set, and one several times as long as the limit of 256 tokens."""
    adi = retrieval("adi")
    return [*adi.queries, *adi.documents, " ".join(adi.documents[:12])]


@pytest.fixture(scope="module")
def engine(minilm_folder: Path) -> Iterator[Engine]:
    with Engine(str(minilm_folder), dtype="float32", device="cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(minilm_folder: Path) -> Any:
    return pytest.importorskip("sentence_transformers").SentenceTransformer(
        str(minilm_folder), device="cpu", local_files_only=True
    )


@pytest.fixture(scope="module")
def expected(reference: Any, texts: list[str]) -> np.ndarray:
    return reference.encode(texts)


@pytest.mark.contract
def test_float32_equals_sentence_transformers(engine, expected, texts):
    output = engine.embed(texts)
    worst = float(np.abs(output.embeddings - expected).max())
    assert worst <= TOLERANCE
    assert output.truncated[-1]
    assert output.truncated.sum() < 5
    # negative control: another text's vector is not equal
    similarity = output.embeddings @ expected.T
    np.fill_diagonal(similarity, 0)
    assert similarity.max() < 1 - 10 * TOLERANCE


@pytest.mark.contract
def test_token_states_equal_sentence_transformers(engine, reference, texts):
    some = texts[::9] + texts[-1:]
    states = reference.encode(some, output_value="token_embeddings", convert_to_numpy=False)
    actual = engine.token_embed(some, normalize=False).embeddings
    assert [len(matrix) for matrix in actual] == [len(matrix) for matrix in states]
    worst = max(float(np.abs(a - b.numpy()).max() / b.abs().max()) for a, b in zip(actual, states, strict=True))
    assert worst <= TOLERANCE


@pytest.mark.contract
# Every fourth text, because processors without bfloat16 instructions take several times as long.
def test_bfloat16_keeps_the_direction(minilm_folder, expected, texts):
    with Engine(str(minilm_folder), dtype="bfloat16", device="cpu") as engine:
        actual = engine.embed(texts[::4]).embeddings
    cosine = (actual * expected[::4]).sum(1)
    assert cosine.min() >= 0.999
    assert np.abs(actual - expected[::4]).max() > TOLERANCE  # bfloat16 was used


def test_the_default_precision_keeps_the_direction(minilm_folder, expected, texts):
    with Engine(str(minilm_folder), device="cpu") as engine:
        actual = engine.embed(texts[::4]).embeddings
    assert (actual * expected[::4]).sum(1).min() >= 0.999


# --- Finding documents (minutes) ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cranfield() -> Retrieval:
    return retrieval("cranfield")


@pytest.fixture(scope="module")
def float32_results(
    minilm_folder: Path, cranfield: Retrieval, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    cache = tmp_path_factory.mktemp("cranfield") / "vectors.db"
    with Engine(str(minilm_folder), dtype="float32", device="cpu", hf_overrides=FORCED, cache=cache) as engine:
        return evaluate(engine, cranfield, widths=list(CRANFIELD))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_cranfield_equals_sentence_transformers(float32_results, reference, cranfield):
    indices = search(reference.encode(list(cranfield.queries)), reference.encode(list(cranfield.documents)), 10)
    theirs = mean_ndcg(cranfield, ids_of(cranfield, indices))
    ours = float32_results["ndcg@10"]["384"]
    assert ours == pytest.approx(theirs, abs=1e-4)
    assert ours == pytest.approx(CRANFIELD[384], abs=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("width", [256, 128, 64])
def test_cranfield_at_narrower_widths(width, float32_results):
    assert float32_results["ndcg@10"][str(width)] == pytest.approx(CRANFIELD[width], abs=0.003)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_coarse_to_fine_keeps_what_the_full_width_finds(float32_results):
    assert float32_results["coarse_to_fine"]["128->384"]["overlap@10"] >= 0.98
    assert float32_results["coarse_to_fine"]["128->384"]["ndcg@10"] == pytest.approx(CRANFIELD[384], abs=0.002)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_maxsim_rerank_is_better_than_the_vectors(float32_results):
    assert float32_results["maxsim"]["dense top 50"] == pytest.approx(0.380, abs=0.005)
    assert float32_results["maxsim"]["dense top 50"] > float32_results["ndcg@10"]["384"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_maxsim_rerank_of_adi_is_better_than_the_vectors(engine):
    adi = retrieval("adi")
    vectors = [engine.embed(part).embeddings for part in (adi.queries, adi.documents)]
    indices = search(*vectors, 50)
    cosine, states = mean_ndcg(adi, ids_of(adi, indices[:, :10])), evaluate_maxsim(engine, adi, indices)
    assert cosine == pytest.approx(0.497, abs=0.003)
    assert states["dense top 50"] == pytest.approx(0.511, abs=0.005)
    assert states["dense top 50"] > cosine
    # The figures are those of the engine's own method.
    documents = [adi.documents[index] for index in indices[0]]
    ranked = engine.rerank(adi.queries[0], documents)
    assert [hit.index for hit in engine.rerank(adi.queries[0], documents, method="cosine")][:10] == list(range(10))
    query = engine.token_embed(adi.queries[:1], role="query", normalize=True).embeddings[0]
    states_of = engine.token_embed(documents, role="document", normalize=True).embeddings
    scores = np.array([(query @ matrix.T).max(axis=1).sum() for matrix in states_of])
    assert [hit.index for hit in ranked] == np.argsort(-scores, kind="stable").tolist()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_cranfield_in_the_default_precision(minilm_folder, cranfield):
    with Engine(str(minilm_folder), device="cpu") as engine:
        vectors = [engine.embed(part).embeddings for part in (cranfield.queries, cranfield.documents)]
        indices = search(*vectors, 50)
        states = evaluate_maxsim(engine, cranfield, indices)
    assert mean_ndcg(cranfield, ids_of(cranfield, indices[:, :10])) == pytest.approx(CRANFIELD[384], abs=0.005)
    assert states["dense top 50"] == pytest.approx(0.380, abs=0.005)


# --- STS Benchmark --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs(data: Path) -> tuple[np.ndarray, list[str], list[str]]:
    """(scores [n] from 0 to 5, sentences, sentences)."""
    with (data / "stsb" / "sts-test.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return np.array([float(row["score"]) for row in rows]), *(  # type: ignore[return-value]
        [row[side] for row in rows] for side in ("sentence1", "sentence2")
    )


def spearman(scores: np.ndarray, judged: np.ndarray) -> float:
    stats = pytest.importorskip("scipy.stats")
    return float(stats.spearmanr(scores, judged).statistic)


@pytest.mark.contract
@pytest.mark.parametrize("step", [6, pytest.param(1, marks=pytest.mark.slow)], ids=["every sixth pair", "all pairs"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_spearman_equals_sentence_transformers(dtype, step, pairs, minilm_folder, reference, record_property):
    judged, left, right = (column[::step] for column in pairs)
    cosines = reference.similarity_pairwise(reference.encode(left), reference.encode(right)).numpy()
    expected = spearman(cosines, judged)
    with Engine(str(minilm_folder), dtype=dtype, device="cpu") as engine:
        scores = engine.score(left, right).scores
    actual = spearman(scores, judged)
    record_property("spearman", actual)
    record_property("reference", expected)
    assert abs(actual - expected) <= (1e-4 if dtype == "float32" else 2e-3)
    # negative control: sentences compared with their neighbours
    assert spearman(np.roll(scores, 1), judged) < 0.2
