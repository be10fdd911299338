"""LateInteractionIndex: what the base of all indexes does with engines, texts and widths."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.late_interaction.index_contract import QUERY, TEXTS, found, matrices, maxsim, names, ragged, units
from tests.tiny import Layout, write_checkpoint
from tests.tiny.heads import write_cross_encoder, write_stanford

from millpond import AsyncEngine, Engine
from millpond.errors import InvalidRequestError, UnsupportedTaskError
from millpond.late_interaction import AddReport, MemoryIndex


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("index-base")


@pytest.fixture(scope="module")
def embedder(folder: Path) -> Iterator[Engine]:
    """48 columns; a prompt for each role."""
    layout = Layout(prompts={"query": "find: ", "document": "keep: "})
    with Engine(
        write_checkpoint(folder / "bert", "bert", sentence_transformers=layout), dtype="float32", device="cpu"
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def trained(folder: Path, embedder: Engine) -> Iterator[Engine]:
    """The same files, said to be trained for cuts."""
    with Engine(folder / "bert", dtype="float32", device="cpu", hf_overrides={"is_matryoshka": True}) as engine:
        yield engine


def rows_of(index: MemoryIndex, engine: Engine, role: Any, text: str) -> np.ndarray:
    """The rows of a text as the index compares them, without pooling."""
    native = engine.token_embed([text], role=role, normalize=True).embeddings
    return index._encoding.queries(native).flat


def test_the_prompts_of_both_roles_are_used(embedder: Engine) -> None:
    index = MemoryIndex(embedder, "float32")
    index.add(names(5), TEXTS)
    query = embedder.token_embed([QUERY], role="query", normalize=True).embeddings[0]
    assert len(query) > len(embedder.token_embed([QUERY], prompt="", normalize=True).embeddings[0])
    rows = embedder.token_embed(TEXTS, role="document", normalize=True).embeddings
    for hit in index.search([QUERY], k=5)[0]:
        assert hit.score == pytest.approx(maxsim(query, rows[int(hit.id[-1])]), abs=1e-3)


def test_an_async_engine_is_used_as_its_engine(embedder: Engine) -> None:
    index = MemoryIndex(AsyncEngine(embedder))  # type: ignore[arg-type]
    assert index.add(["a"], ["text"]) == AddReport(added=1) and found(index.search(["text"])) == [["a"]]


def test_a_checkpoint_without_token_vectors_is_refused(folder: Path) -> None:
    with (
        Engine(write_cross_encoder(folder / "cross"), dtype="float32", device="cpu") as cross,
        pytest.raises(UnsupportedTaskError, match=r"has no token vectors \(it serves .*use an embedder"),
    ):
        MemoryIndex(cross)


@pytest.mark.parametrize(
    "kind",
    [tuple, np.array, iter, lambda values: (value for value in values)],
    ids=["tuple", "array", "iterator", "generator"],
)
def test_ids_and_texts_may_be_any_iterable(embedder: Engine, kind: Any) -> None:
    index = MemoryIndex(embedder)
    assert index.add(kind(names(5)), kind(TEXTS), kind([{"n": 1}] * 5)) == AddReport(added=5)
    assert index.ids() == names(5) and index.get("doc-2").text == TEXTS[2]  # type: ignore[union-attr]
    assert type(index.get("doc-2").text) is str  # type: ignore[union-attr]
    assert index.delete(kind(names(2))) == 2


def test_a_mapping_or_none_is_no_list(embedder: Engine) -> None:
    index = MemoryIndex(embedder)
    wrong: Any
    for wrong in (None, {"a": 1}, 3):
        with pytest.raises(TypeError, match=r"ids is of type \w+; pass a list of str"):
            index.add(wrong, ["x"])
        with pytest.raises(TypeError, match=r"texts is of type \w+; pass a list of str"):
            index.add(["x"], wrong)


def test_an_error_keeps_the_pieces_before_it(embedder: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond.late_interaction.index.base._PIECE", 4)
    index = MemoryIndex(embedder)
    token_embed, calls = embedder.token_embed, []

    def failing(texts: Sequence[str], **options: Any) -> Any:
        calls.append(len(texts))
        if len(calls) == 3:
            raise RuntimeError("no memory")
        return token_embed(texts, **options)

    monkeypatch.setattr(embedder, "token_embed", failing)
    ids, texts = names(10), [f"text {number}" for number in range(10)]
    with pytest.raises(RuntimeError):
        index.add(ids, texts)
    assert calls == [4, 4, 2] and index.ids() == ids[:8]
    assert index.add(ids, texts) == AddReport(added=2, replaced=8)
    assert sorted(index.ids()) == sorted(ids)


def test_long_documents_are_stored_a_few_at_a_time(embedder: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their float32 rows would not fit memory together."""
    monkeypatch.setattr("millpond.late_interaction.index.base._PIECE_CHARACTERS", 100)
    monkeypatch.setattr("millpond.late_interaction.index.base._PIECE_ROWS", 20)
    sizes: list[int] = []
    upsert = MemoryIndex._upsert

    def counted(index: MemoryIndex, documents: Any) -> int:
        sizes.append(len(documents))
        return upsert(index, documents)

    monkeypatch.setattr(MemoryIndex, "_upsert", counted)
    index = MemoryIndex(embedder)
    index.add(names(7), ["word " * length for length in (4, 4, 12, 3, 50, 50, 1)])
    assert sizes == [3, 1, 1, 1, 1] and index.ids() == names(7)
    sizes.clear()
    index = MemoryIndex(None)
    index.add_embeddings(names(5), ragged(matrices(5, tokens=[8, 12, 30, 1, 0])))
    assert sizes == [2, 1, 2] and index.stats().tokens == 51


def test_progress_is_drawn_in_a_terminal(
    embedder: Engine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    MemoryIndex(embedder).add([*names(5), "blank"], [*TEXTS, " "], show_progress=True)
    assert "5/5" in capsys.readouterr().err
    MemoryIndex(embedder).add(names(5), TEXTS)
    assert capsys.readouterr().err == ""


# --- width and pooling ------------------------------------------------------------------------------------------------


def test_a_checkpoint_trained_for_it_is_cut(trained: Engine, tmp_path: Path) -> None:
    index = MemoryIndex(trained, "float32", dimensions=16)
    index.add(names(5), TEXTS)
    cut = units(trained.token_embed([QUERY], role="query").embeddings.flat[:, :16])
    np.testing.assert_allclose(rows_of(index, trained, "query", QUERY), cut, atol=1e-6)
    assert index.stats().dimensions == 16
    index.save(tmp_path / "index")
    opened = MemoryIndex.open(tmp_path / "index", trained, dimensions=16)
    assert opened.search([QUERY]) == index.search([QUERY])
    np.testing.assert_allclose(rows_of(opened, trained, "query", QUERY), cut, atol=1e-6)


def test_other_rows_are_projected_to_where_they_spread(embedder: Engine) -> None:
    index = MemoryIndex(embedder, "float32", dimensions=16)
    index.add(names(5), TEXTS)
    native = embedder.token_embed(TEXTS, role="document", normalize=True).embeddings.flat
    projected = np.concatenate([rows_of(index, embedder, "document", text) for text in TEXTS])
    cut = units(native[:, :16])

    def loss(rows: np.ndarray) -> float:
        return float(np.abs(rows @ rows.T - native @ native.T).mean())

    assert loss(projected) < 0.5 * loss(cut)
    # What is added later is projected alike.
    index.add(["again"], [TEXTS[0]])
    scores = {hit.id: hit.score for hit in index.search([QUERY], k=6)[0]}
    assert scores["again"] == pytest.approx(scores["doc-0"], abs=1e-3)


def test_the_width_of_the_rows_projects_nothing(embedder: Engine) -> None:
    index = MemoryIndex(embedder, dimensions=48)
    index.add(names(5), TEXTS)
    assert index._encoding.settings.projection is None and index.stats().dimensions == 48  # type: ignore[union-attr]


def test_embeddings_of_another_width_than_the_engine_are_refused(embedder: Engine) -> None:
    index = MemoryIndex(embedder)
    for call in (index.search_embeddings, lambda rows: index.add_embeddings(["a"], rows)):
        with pytest.raises(InvalidRequestError, match=r"are 32 wide, and the token vectors of .* 48"):
            call(ragged(matrices(1)))
    assert index.search([QUERY]) == [[]]


def test_threads_that_add_first_fit_one_projection() -> None:
    for round in range(5):
        index = MemoryIndex(None, "float32", dimensions=4)
        barrier = threading.Barrier(4)

        def add(number: int, index: MemoryIndex = index, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            index.add_embeddings([f"doc-{number}"], ragged(matrices(1, tokens=60, seed=number)))

        threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number in range(4):
            matrix = matrices(1, tokens=60, seed=number)[0]
            hits = {hit.id: hit.score for hit in index.search_embeddings(ragged([matrix]))[0]}
            assert hits[f"doc-{number}"] == pytest.approx(60, abs=1e-3), round  # projected as the query is


def test_pooling_keeps_the_first_row_and_halves_the_others() -> None:
    values = matrices(6, tokens=[1, 2, 3, 9, 20, 0])
    index = MemoryIndex(None, "float32", pool_factor=2)
    index.add_embeddings(names(6), ragged(values))
    assert index.stats().tokens == 1 + 2 + 2 + 5 + 10 + 0
    for number, matrix in enumerate(values[:5]):
        # The first row of a document is stored as it is, and a query is not pooled.
        hit = index.search_embeddings(ragged([matrix[:1]]), ids=[f"doc-{number}"])[0][0]
        assert hit.score == pytest.approx(1, abs=1e-5)


def test_the_settings_of_an_index_keep_the_model_that_filled_it(folder: Path, tmp_path: Path) -> None:
    with Engine(write_stanford(folder / "colbert"), dtype="float32", device="cpu") as engine:
        index = MemoryIndex(engine)
        assert index.model is None
        index.add(["a"], ["text"])
        index.save(tmp_path / "index")
        without = MemoryIndex.open(tmp_path / "index", None)
        assert without.model == index.model and index.model is not None and index.model.model == "colbert"
        without.add_embeddings(["b"], engine.token_embed(["another"], normalize=True).embeddings)
        without.save(tmp_path / "index")
        assert MemoryIndex.open(tmp_path / "index", engine).model == index.model
