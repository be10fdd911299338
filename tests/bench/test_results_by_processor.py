"""Results of benchmarks: one file, one table and one plot for each kind of processor, and none replaces another's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import record
from peers import page, plots
from peers.caps import CAPS, NOT_CAPPED
from peers.engines import COMPETITORS, REFERENCE, default_engines
from peers.targets import verdicts
from processor import ISAS, kind

ROOT = Path(__file__).parents[2]
ZEN4 = {
    "processor": "AMD EPYC",
    "vendor": "AMD",
    "microarchitecture": "Zen 4",
    "isa": "avx512bf16",
    "cores": 2,
    "instruction_sets": ["avx2", "avx512_bf16"],
}
INTEL = {
    "processor": "Intel(R) Xeon(R) Processor",
    "vendor": "Intel",
    "microarchitecture": "Sapphire Rapids",
    "isa": "amx",
    "cores": 2,
}
CAPPED = {**ZEN4, "cap": "avx2", "isa": "avx2"}


def speeds(ours: int, **theirs: int) -> dict[str, Any]:
    rates = {"millpond": ours, "st-fp32": 1000, **{name.replace("_", "-"): rate for name, rate in theirs.items()}}
    return {
        name: {"equal": True, "tokens_per_second": rate, "ratio": rate / 1000, "median_seconds": 1 / rate}
        for name, rate in rates.items()
    }


def embed(ours: int, **theirs: int) -> dict[str, Any]:
    described = {"texts": 3, "tokens": 150, "mean_tokens": 50.0, "longest": 60}
    return {"workloads": {"docs": {"rows": speeds(ours, **theirs), **described}}, "source": "books", "left_out": {}}


def measured_on(monkeypatch: pytest.MonkeyPatch, hardware: dict[str, Any], results: dict[str, Any], to: Path) -> Path:
    monkeypatch.setattr(record, "hardware", lambda: dict(hardware))
    return record.record("embed", results, folder=to)


def section(text: str, name: str) -> str:
    return text.split(f"<!-- begin {name} -->")[1].split(f"<!-- end {name} -->")[0]


def filled(results: Path) -> str:
    return page.fill((ROOT / "docs" / "performance.md").read_text(encoding="utf-8"), results)


def test_a_run_on_another_processor_adds_a_table_and_a_later_one_replaces_its_own(tmp_path, monkeypatch):
    first = measured_on(monkeypatch, ZEN4, embed(2000), tmp_path)
    other = measured_on(monkeypatch, INTEL, embed(5000), tmp_path)
    capped = measured_on(monkeypatch, CAPPED, embed(1500), tmp_path)
    assert len({first, other, capped}) == 3
    assert measured_on(monkeypatch, ZEN4, embed(3000), tmp_path) == first
    text = section(filled(tmp_path), "embed")
    titles = [line for line in text.splitlines() if line.startswith("**")]
    assert titles == [
        "**AMD EPYC (Zen 4), avx512bf16, 2 cores**",
        "**AMD EPYC (Zen 4), capped to avx2, 2 cores**",
        "**Intel(R) Xeon(R) Processor (Sapphire Rapids), amx, 2 cores**",
    ]
    ours = [line for line in text.splitlines() if line.startswith("| **millpond** |")]
    assert [line.split("**")[3] for line in ours] == ["3.0 k (3.0)", "1.5 k (1.5)", "5.0 k (5.0)"]
    assert "`benchmarks/results/amd-zen-4-2-cores/embed.json`" in text and "avx2, avx512_bf16" in text
    drawn = plots.draw(tmp_path, tmp_path / "images")
    assert {path.name for path in drawn} == {
        "bench-embed-amd-zen-4-2-cores.svg",
        "bench-embed-amd-zen-4-2-cores-avx2.svg",
        "bench-embed-intel-sapphire-rapids-2-cores.svg",
    }
    assert all(f"(images/{path.name})" in text for path in drawn)


def test_a_file_from_before_the_folders_is_shown_until_its_kind_is_measured_again(tmp_path, monkeypatch):
    content = {"benchmark": "embed", "when": "2026-01-02", "commit": None, "hardware": ZEN4, "results": embed(1234)}
    (tmp_path / "embed.json").write_text(json.dumps(content))
    measured_on(monkeypatch, INTEL, embed(5000), tmp_path)
    text = section(filled(tmp_path), "embed")
    assert "1.2 k" in text and "5.0 k" in text and "(images/bench-embed.svg)" in text
    measured_on(monkeypatch, ZEN4, embed(3000), tmp_path)
    text = section(filled(tmp_path), "embed")
    assert "1.2 k" not in text and "3.0 k" in text and "5.0 k" in text and "(images/bench-embed.svg)" not in text


def test_every_recorded_result_loads_and_the_page_shows_it():
    found = record.recorded()
    files = list(record.RESULTS.rglob("*.json"))
    names = {content["file"] for contents in found.values() for content in contents}
    assert names <= {path.relative_to(record.RESULTS).as_posix() for path in files}
    assert {path.stem for path in files} == set(found)
    assert all(kind(content["hardware"]) != "unknown" for contents in found.values() for content in contents)
    shown = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert page.fill(shown, record.RESULTS) == shown, "run python benchmarks/compare.py --page"


def test_each_processor_has_the_targets_of_its_instruction_set(tmp_path, monkeypatch):
    measured_on(monkeypatch, ZEN4, embed(2000, vllm=1000, st_openvino=1000), tmp_path)
    measured_on(monkeypatch, INTEL, embed(5000, vllm=1000, st_openvino=2000), tmp_path)
    measured_on(monkeypatch, CAPPED, embed(3000, vllm_fp32=2000), tmp_path)
    amd, capped, intel = section(filled(tmp_path), "targets").split("\n\n**")
    assert "| embedding with AVX512-BF16 against vLLM bf16 | 1.7\u00d7 | 2.00\u00d7 | reached | `embed` |" in amd
    assert "| embedding with AVX512-BF16 against OpenVINO | 2.6\u00d7 | 2.00\u00d7 | missed | `embed` |" in amd
    assert "| embedding with AVX2 against the fastest peer | 2\u00d7 | 1.50\u00d7 | missed | `embed` |" in capped
    assert "| embedding with AMX against the fastest peer | 4\u00d7 | 2.50\u00d7 | missed | `embed` |" in intel
    assert "with AMX" not in amd + capped and "with AVX2" not in amd + intel


def test_the_fastest_peer_is_one_with_equal_results():
    rows = speeds(4000, vllm=2000, st_openvino=8000)
    rows["st-openvino"] = {"equal": False}
    results = {"embed": {"workloads": {"docs": {"rows": rows}}}}
    values = {target.what: value for target, value in verdicts(results, isa="amx")}
    assert values["embedding with AMX against the fastest peer"] == 2.0
    assert values["embedding with AMX, two cores"] == 4.0


def test_a_docstring_alone_is_beside_the_short_text():
    row = {"equal": True, "p50_ms": 3.0, "p95_ms": 4.0, "p99_ms": 5.0}
    slow = {**row, "p50_ms": 9.0}
    results = {
        "rows": {"millpond": row, "vllm": {"equal": False}},
        "tokens": 10.4,
        "docstring": {"rows": {"millpond": row, "vllm": slow}, "tokens": 50.1},
        "left_out": {},
    }
    table = page.latency_table(results)
    assert {line.count("|") for line in table.splitlines()} == {8}
    assert "one of 50 tokens, p50" in table
    assert "| vLLM bf16 | not equal | not equal | not equal | 9.00 | 4.00 | 5.00 |" in table
    targets = {target.what: value for target, value in verdicts({"latency": results}, isa="amx")}
    assert targets["one docstring of 50 tokens, p50, against the fastest peer"] == 3.0


def test_the_table_says_which_engines_ran_without_the_cap():
    results = {**embed(2000, st_onnx=1500), "not_capped": ["st-onnx"]}
    assert "- sentence-transformers ONNX runs without the cap" in page.embed_table(results)


def test_a_cap_is_one_of_ours_and_applies_to_torch_and_onednn_too():
    assert set(CAPS) == set(ISAS) - {"amx"}
    for name, variables in CAPS.items():
        assert variables["MILLPOND_ISA"] == name
        assert {"ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"} <= set(variables)
    assert set(NOT_CAPPED) <= set(COMPETITORS)


@pytest.mark.parametrize(
    ("flags", "cap", "half"),
    [
        (["avx2", "avx512_bf16"], None, True),
        (["amx_bf16"], "avx512bf16", True),
        (["asimd", "bf16"], None, True),
        (["avx2"], None, False),
        (["avx2", "avx512_bf16"], "avx2", False),
        (["avx2", "avx512_bf16"], "avx512", False),
    ],
)
def test_peers_run_in_bfloat16_only_where_the_processor_does(flags: list[str], cap: str | None, half: bool):
    chosen = default_engines(flags, cap)
    assert REFERENCE in chosen and "millpond" in chosen and "st-openvino" in chosen
    assert ("vllm" in chosen) == half and ("vllm-fp32" in chosen) != half
    assert ("st-bf16" in chosen) == half


def test_the_engines_processes_and_the_record_see_the_cap(tmp_path: Path):
    program = (
        "import json, os, sys; sys.argv[1:] = ['--isa', 'avx2', '--results', sys.argv[1]]\n"
        "import compare, record\n"
        "options = compare.arguments()\n"
        "names = ('MILLPOND_ISA', 'ONEDNN_MAX_CPU_ISA', 'ATEN_CPU_CAPABILITY')\n"
        "print(json.dumps([options.engines, [os.environ.get(name) for name in names], record.hardware().get('cap')]))"
    )
    environment = {name: value for name, value in os.environ.items() if name not in CAPS["avx2"]}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "benchmarks"), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, env=environment
    )
    if "this processor has no avx2" in run.stderr:
        pytest.skip("needs AVX2")
    engines, variables, cap = json.loads(run.stdout.splitlines()[-1])
    assert variables == ["avx2", "AVX2", "avx2"]
    assert cap == ("avx2" if "avx512f" in record.hardware()["instruction_sets"] else None)
    assert "vllm" not in engines and "vllm-fp32" in engines
