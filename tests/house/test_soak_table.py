"""The table, the curve and the plot of benchmarks/soak.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peers import page, plots, soaking
from soak import Sample, curve

ROOT = Path(__file__).parents[2]


def results(**more: Any) -> dict[str, Any]:
    return {
        "minutes": 30.0,
        "clients": 24,
        "requests": 1234567,
        "by_status": {"200": 1234000, "429": 567},
        "left_early": 89,
        "items_compared": 7654321,
        "wrong": 0,
        "seconds": {"p50": 0.1, "p99": 0.25, "p100": 3.0},
        "health_seconds": {},
        "held": {
            "mib_when_quiet": [600.2, 612.8],
            "mib_at_most": 700.0,
            "mib_per_hour_in_the_second_half": -1.25,
            "threads_when_quiet": [14, 17],
            "files_when_quiet": [15, 16],
        },
        "warm_minutes": 6.0,
        "curve": [[0.0, 500.0, 10, 14], [15.0, 640.0, 16, 60], [30.0, 650.0, 16, 61]],
        "metrics": {"unexplained": 0},
        "end": {"running": 12, "lost": 0},
        "problems": [],
        **more,
    }


def test_the_table_has_a_line_for_each_figure():
    drawn = soaking.table(results())
    assert {line.count("|") for line in drawn.splitlines()} == {3}
    assert "| requests answered | 1,234,567: 1,234,000 of 200, 567 of 429 |" in drawn
    assert "| answers, p50 and p99 ms | 100.0, 250.0 |" in drawn
    assert "| `/health` meanwhile, p50 and p99 ms | - |" in drawn
    assert "| 14 and 15; 17 and 16 |" in drawn
    assert "| problems | none |" in drawn
    assert "| problems | memory grew; lost |" in soaking.table(results(problems=["memory grew", "lost"]))


@pytest.mark.parametrize("count", [0, 1, soaking.POINTS, 3 * soaking.POINTS + 1])
def test_the_curve_is_thinned_and_keeps_its_peak(count: int):
    samples = [Sample(at=10.0 + 60 * i, rss=2**20 * (i % 97), threads=3, files=4) for i in range(count)]
    drawn = curve(samples, began=10.0)
    assert len(drawn) <= soaking.POINTS
    assert drawn == sorted(drawn)
    assert max((mib for _, mib, _, _ in drawn), default=0) == max((look.rss / 2**20 for look in samples), default=0)
    if count == soaking.POINTS:
        assert drawn[1] == (1.0, 1.0, 3, 4)


def test_the_page_has_markers_and_an_image(tmp_path: Path):
    content = {
        "benchmark": "soak",
        "when": "2026-01-02T03:04:05",
        "commit": "0123456789",
        "hardware": {"processor": "a processor", "cores": 2, "memory": 1e9},
        "results": results(),
    }
    (tmp_path / "soak.json").write_text(json.dumps(content))
    filled = page.fill((ROOT / "docs" / "performance.md").read_text(encoding="utf-8"), tmp_path)
    section = filled.split("<!-- begin soak -->")[1].split("<!-- end soak -->")[0]
    assert "(images/bench-soak.svg)" in section and "| clients that left before their answer | 89 |" in section
    assert "a processor, 2 cores, 1 GB. Results:" in section
    (drawn,) = plots.draw(tmp_path, tmp_path / "images")
    assert drawn.name == "bench-soak.svg" and "resident memory" in drawn.read_text(encoding="utf-8")
