"""The tables of benchmarks/serve.py, and the performance targets that use its results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peers import page, serving
from peers.targets import TARGETS, verdicts

ROOT = Path(__file__).parents[2]
SERVERS = ("millpond", "vllm")


def results(*names: str) -> dict[str, Any]:
    spread = {"p50": 1.0, "p95": 2.0, "p99": 3.0, "mean": 1.5, "max": 4.0}
    refused = {"429": {"requests": 7, "latency_ms": {**spread, "p99": 12.0}}}
    health = {"asked": 9, "p50": 0.5, "p99": 1.5, "p100": 2.5}
    rates = {"engine, one call": 400.0, "engine, 1": 200.0, "engine, 8": 380.0}
    rates |= {f"{name} float, {callers}": 190.0 * callers / 4 for name in names for callers in (1, 8)}
    return {
        "throughput": {
            "texts": 1024,
            "mean_tokens": 50.0,
            "texts_per_request": 32,
            "callers": [1, 8],
            "texts_per_second": rates,
            "share_of_engine": {name: 0.9 for name in rates if not name.startswith("engine")},
        },
        "singles": {"mean_tokens": 10.0, "milliseconds": {f"{name}, one after the other": spread for name in names}},
        "overload": {
            "offered": 3.0,
            "max_queue": 512,
            "rows": {
                name: {
                    "offered_per_second": 36.0,
                    "served_per_second": 12.0,
                    "statuses": {
                        "200": {"requests": 3, "latency_ms": spread}, **(refused if name == "millpond" else {})
                    },
                    "health_ms": {"alone": health, "at_full_load": health, "overloaded": {"asked": 0}},
                }
                for name in names
            },
        },
    }  # fmt: skip


@pytest.mark.parametrize("names", [SERVERS, SERVERS[:1]], ids=["with vLLM", "without"])
def test_every_section_is_a_table(names: tuple[str, ...]):
    drawn = serving.table(results(*names))
    for block in drawn.split("\n\n"):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in rows}) <= 1
    assert "| millpond float | 48 (90%) | 380 (90%) |" in drawn
    assert ("| vllm float |" in drawn) == ("vllm" in names)
    assert f"| refused, p99 ms | 12.0 |{' - |' * (len(names) - 1)}\n" in drawn
    assert f"| /health overloaded, p50 ms |{' - |' * len(names)}\n" in drawn


def test_sections_that_were_not_measured_are_left_out():
    assert serving.table({"singles": results("millpond")["singles"]}).count("\n| --- |") == 1
    assert "Left out: vllm (no wheel)." in serving.table({"left_out": {"vllm": "no wheel"}})


def test_the_targets_read_the_results():
    values = {
        target.what: value for target, value in verdicts({"serve": results(*SERVERS)}) if target.result == "serve"
    }
    assert list(values.values()) == [0.9, 12.0]
    unrefused = results("millpond")
    del unrefused["overload"]["rows"]["millpond"]["statuses"]["429"]
    assert [value for target, value in verdicts({"serve": unrefused}) if target.result == "serve"] == [0.9, None]
    assert sum(target.result == "serve" for target in TARGETS) == 2


def test_the_page_has_markers_for_the_tables(tmp_path: Path):
    content = {
        "benchmark": "serve",
        "when": "2026-01-02T03:04:05",
        "commit": "0123456789",
        "hardware": {"processor": "a processor", "cores": 2, "memory": 1e9},
        "results": results(*SERVERS),
    }
    (tmp_path / "serve.json").write_text(json.dumps(content))
    filled = page.fill((ROOT / "docs" / "performance.md").read_text(encoding="utf-8"), tmp_path)
    section = filled.split("<!-- begin serve -->")[1].split("<!-- end serve -->")[0]
    assert "| vllm float |" in section and "commit 0123456789" in section
