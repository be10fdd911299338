"""Modules of benchmarks/late_interaction.py: its sets of passages, exact rankings, times, table and plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import late_interaction
import numpy as np
import pytest
from peers import page, plots, ranking, token_states, token_worker
from peers.environments import RECIPES
from peers.passages import documentation, long_passages, short_passages
from peers.retrieval_page import ENGINES
from peers.token_peers import PEERS, Built, best
from peers.token_states import TokenStates
from peers.token_worker import least, measure
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

ROOT = Path(__file__).parents[2]


def states(lengths: list[int], *, queries: int = 3) -> TokenStates:
    chance = np.random.default_rng(0)
    return TokenStates(
        name="made",
        flat=chance.standard_normal((sum(lengths), 16)).astype(np.float16),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        queries=[chance.standard_normal((2 + i, 16)).astype(np.float32) for i in range(queries)],
        grades=[{i: 1} for i in range(queries)],
    )


@pytest.mark.parametrize(
    "lengths",
    [[3, 1, 4], [0, 2, 0, 0, 5, 0], [ranking.BLOCK + 7, 2, ranking.BLOCK, 1]],
    ids=["short", "empty ones between", "longer than a block"],
)
def test_exact_scores_are_maxsim_of_every_pair(lengths):
    made = states(lengths)
    expected = np.full((3, len(lengths)), -np.inf)
    for q, query in enumerate(made.queries):
        for d in range(len(lengths)):
            rows = made.flat[made.offsets[d] : made.offsets[d + 1]].astype(np.float64)
            if len(rows):
                expected[q, d] = (query.astype(np.float64) @ rows.T).max(1).sum()
    np.testing.assert_allclose(ranking.exact_scores(made, 3), expected, rtol=1e-4)


def test_exact_ranking_is_kept_as_a_file(tmp_path):
    made = states([2] * 30)
    ranked = ranking.exact_ranking(made, 2, folder=tmp_path)
    np.testing.assert_array_equal(ranked, ranking.top(ranking.exact_scores(made, 2), 10))
    (kept,) = tmp_path.iterdir()
    np.save(kept, ranked + 1)
    np.testing.assert_array_equal(ranking.exact_ranking(made, 2, folder=tmp_path), ranked + 1)


def test_recall_and_ndcg_of_known_rankings():
    exact = np.arange(20).reshape(2, 10)
    assert ranking.recall([list(range(10)), [10, 11, *range(8)]], exact) == pytest.approx(0.6)
    assert ranking.ndcg([[5, 3], [1]], [{3: 1}, {1: 2}]) == pytest.approx((1 / np.log2(3) + 1) / 2)
    assert ranking.ndcg([[5], [1]], [{}, {1: 2}]) == 1  # a query without a relevant document does not count


def test_best_of_scores_puts_the_lower_index_first():
    scores = np.array([1, 3, 2, 3, 3, 0], np.float32)
    assert best(scores, 2) == [1, 3]
    assert best(scores, 9) == [1, 3, 4, 2, 0, 5]


WORDS = [f"word{i}" for i in range(400)]


@pytest.fixture
def tokenizer() -> Any:
    made: Any = Tokenizer(WordLevel({word: i for i, word in enumerate(["?", *WORDS])}, unk_token="?"))
    made.pre_tokenizer = Whitespace()
    return made


def texts(count: int) -> list[str]:
    chance = np.random.default_rng(1)
    listed = []
    for i in range(count):
        words = [WORDS[at] for at in chance.integers(0, len(WORDS), 300)]
        listed.append(f"A sentence of text number {i} is here. " + " ".join(words) if i % 2 else " ".join(words))
    return listed


@pytest.mark.parametrize("made", [short_passages, long_passages], ids=["short", "long"])
def test_passages_are_distinct_and_known_items_keep_their_passage(made, tokenizer):
    found = made(texts(80), tokenizer, count=60, queries=12)
    assert len(found.passages) == len(set(found.passages)) == 60
    assert len(found.queries) == len(found.relevant) == len(set(found.relevant)) == 12
    longest = 60 if made is short_passages else 256
    assert max(len(tokenizer.encode(passage).ids) for passage in found.passages) <= longest
    originals = {text.split(". ")[0]: text.split(". ")[1] for text in texts(80) if ". " in text}
    for query, at in zip(found.queries, found.relevant, strict=True):
        assert originals[query].startswith(found.passages[at])
    assert made(texts(80), tokenizer, count=60, queries=12) == found


def test_equal_passages_are_taken_once(tokenizer):
    listed = [" ".join(WORDS[:20]), " ".join(WORDS[:20]).upper() + "!", " ".join(WORDS[20:40])]
    found = short_passages(listed, tokenizer, count=10, queries=0)
    assert len(found.passages) == 2


def test_documentation_reads_docstrings_and_sections(tmp_path):
    (tmp_path / "a.py").write_text('"""One two three four five six seven eight nine."""\ndef f():\n    "short"\n')
    (tmp_path / "b.py").write_text("this is no Python")
    (tmp_path / "c.md").write_text("# One two three four five six seven eight\n\n# Nine\ntext")
    (tmp_path / "d.rst").write_text("# One two three four five six seven eight\n\n# Nine\ntext")  # the same file again
    found = documentation((tmp_path,))
    assert found == ("One two three four five six seven eight nine.", "# One two three four five six seven eight\n")


def test_projection_finds_the_directions_of_the_rows():
    chance = np.random.default_rng(2)
    basis, _ = np.linalg.qr(chance.standard_normal((24, 24)))
    rows = (chance.standard_normal((500, 3)) @ basis[:3]).astype(np.float32)
    directions = token_states.projection(rows, 3)
    np.testing.assert_allclose(rows @ directions @ directions.T, rows, atol=1e-4)
    assert np.abs(rows @ token_states.projection(rows, 2) @ token_states.projection(rows, 2).T - rows).max() > 0.1


def test_written_token_states_are_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(token_states, "WIDTH", 4)
    chance = np.random.default_rng(3)

    class Engine:
        def token_embed(self, texts: list[str], *, role: str, normalize: bool) -> Any:
            assert normalize
            matrices = [chance.standard_normal((len(text.split()), 8)).astype(np.float32) for text in texts]
            embeddings = type("Ragged", (), {})()
            embeddings.flat = token_states.normalized(np.concatenate(matrices))
            embeddings.offsets = np.cumsum([0, *map(len, matrices)])
            return type("Output", (), {"embeddings": embeddings})

    made = token_states.Texts(documents=["a b c", "d", "e f"], queries=["g h i j", "k"], grades=[{1: 2}, {0: 1, 2: 1}])
    token_states.encode(Engine(), "docs5k", made, tmp_path)
    read = token_states.load(tmp_path, "docs5k", width=4, query_tokens=3)
    assert read.offsets.tolist() == [0, 3, 4, 6] and read.flat.shape == (6, 4)
    assert [len(query) for query in read.queries] == [3, 1]
    assert read.grades == [{1: 2}, {0: 1, 2: 1}]
    np.testing.assert_allclose(np.linalg.norm(read.flat.astype(np.float32), axis=1), 1, atol=2e-3)


def test_a_time_is_the_least_of_the_repeats_and_the_budget_ends_it(monkeypatch):
    seen: list[int] = []
    timed = least(seen.append, [1, 2, 3], repeats=4, budget=60.0)
    assert seen == [1] * 4 + [2] * 4 + [3] * 4 and timed["timed_queries"] == 3
    seen.clear()
    assert least(seen.append, [1, 2, 3], repeats=4, budget=0.0)["timed_queries"] == 1 and seen == [1]
    clock = iter([0.0, 3.0, 10.0, 11.0, 20.0, 22.0, 30.0, 35.0, 40.0, 47.0, 50.0, 56.0])  # 3, 1, 2 and 5, 7, 6 seconds
    monkeypatch.setattr(token_worker.time, "process_time", lambda: next(clock))
    assert least(seen.append, [1, 2], repeats=3, budget=60.0)["cpu_ms"] == pytest.approx(3000)


def test_a_measurement_has_rankings_bytes_and_further_figures(tmp_path):
    made = states([2] * 12)
    closed: list[bool] = []

    def engine(given: TokenStates, folder: Path) -> Built:
        return Built(
            settings={"fast": lambda query: [len(query)]},
            stored=48,
            scanned={"fast": 24},
            more={"writes": lambda: {"added": 3}},
            close=lambda: closed.append(True),
        )

    measured = measure(engine, made, tmp_path, queries=2, timed=1, budget=5.0, more=None)
    assert measured["bytes_per_token"] == 2 and measured["writes"] == {"added": 3} and closed == [True]
    row = measured["settings"]["fast"]
    assert row["rankings"] == [[2], [3]] and row["scanned_bytes"] == 24
    assert "writes" not in measure(engine, made, tmp_path, queries=2, timed=1, budget=5.0, more=())


def result(engines: list[str]) -> dict[str, Any]:
    origin = {
        "when": "2026-11-22T10:00:00+00:00",
        "commit": "0123456789abc",
        "load": 0.5,
    }
    row = {"cpu_ms": 4.0, "recall@10": 0.95, "ndcg@10": 0.5, "ndcg@10 exact": 0.501, "scanned_bytes": 40_000_000}
    found = {
        name: {
            "build_cpu_s": 3.0,
            "bytes_per_token": 68.25,
            "settings": {"default": dict(row), "wide": {**row, "cpu_ms": 8.0, "scanned_bytes": None}},
        }
        for name in engines
    }
    found["plaid-4"]["writes"] = {
        **{f"{what}_{clock}_ms": 1.5 for what in ("delete", "add") for clock in ("wall", "cpu")},
        "added": 100,
    }
    found["plaid-4"]["threads"] = {"wall_ms_1": 4.0, "wall_ms_2": 2.0, "speedup": 2.0}
    section = {
        "documents": 5000,
        "tokens": 900_000,
        "query_tokens": 20.0,
        "ndcg@10 exact": 0.51,
        "engines": found,
        "left_out": {"colsearch": "no wheel"},
        "origin": origin,
    }
    quality = {"dense": {"ndcg@10": 0.374}, "int8": {"ndcg@10": 0.381, "recall@10": 0.99}, "origin": origin}
    return {
        "processors": {
            "A processor": {
                "bandwidth": 2e10,
                "sets": {"docs5k": {"search": section}, "cranfield": {"quality": quality}},
            }
        }
    }


def test_the_page_has_a_row_for_every_engine_and_setting(tmp_path):
    content = {
        "benchmark": "late_interaction",
        "when": "2026-11-22",
        "commit": None,
        "hardware": {"processor": "A processor", "cores": 2},
        "results": result(["plaid-4", "maxsim-cpu"]),
    }
    (tmp_path / "late_interaction.json").write_text(json.dumps(content))
    filled = page.fill((ROOT / "docs" / "performance.md").read_text(encoding="utf-8"), tmp_path)
    assert "| **millpond PlaidIndex 4 bits, default** | **4.00** | **0.950** | **-0.0010** | **50%** |" in filled
    assert "| maxsim-cpu, wide | 8.00 | 0.950 | -0.0010 | - | 68 | 3.0 |" in filled
    assert "- Without colsearch: no wheel." in filled
    assert "delete one document 1.50 ms" in filled and "two threads 2.00 times as fast" in filled
    assert "| dense | 0.3740 | - |" in filled and "| int8 | 0.3810 | 0.990 |" in filled
    (drawn,) = plots.draw(tmp_path, tmp_path)
    assert drawn.name == "bench-late_interaction.svg" and "millpond PlaidIndex 4 bits" in drawn.read_text()


def found(engine: str, *, left_out: dict[str, str], cpu_ms: float = 1.0) -> dict[str, Any]:
    engines = {engine: {"settings": {"": {"cpu_ms": cpu_ms}}}}
    return {"engines": engines, "left_out": left_out, "environments": {}}


def test_a_later_run_keeps_other_engines_and_other_processors(tmp_path, monkeypatch):
    def keep(processor: str, section: dict[str, Any], bandwidth: float) -> None:
        monkeypatch.setattr(late_interaction, "hardware", lambda: {"processor": processor, "load": 1.0})
        late_interaction.keep(tmp_path, "cranfield", "search", section, bandwidth)

    keep("one", found("plaid-4", left_out={"maxsim-cpu": "no wheel", "colsearch": "too slow"}), 3e10)
    keep("other", found("plaid-4", left_out={}, cpu_ms=9.0), 1e10)
    keep("one", found("maxsim-cpu", left_out={"plaid-4": "broken"}), 2e10)
    processors = json.loads((tmp_path / "late_interaction.json").read_text())["results"]["processors"]
    one = processors["one"]["sets"]["cranfield"]["search"]
    assert set(one["engines"]) == {"plaid-4", "maxsim-cpu"}
    assert one["left_out"] == {"colsearch": "too slow"}
    assert processors["one"]["bandwidth"] == 3e10
    other = processors["other"]["sets"]["cranfield"]["search"]["engines"]
    assert other["plaid-4"]["settings"][""]["cpu_ms"] == 9.0


def test_every_engine_has_a_title_and_every_peer_an_environment():
    from peers.token_indexes import INDEXES

    assert set(ENGINES) == {*INDEXES, *PEERS}
    assert {environment for environment, _ in PEERS.values()} <= set(RECIPES)
