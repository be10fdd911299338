"""The tables of docs/scale.md follow from the inputs that it names."""

from __future__ import annotations

import re

import pytest
from scale_plan import PAGE, Plan, fill, tables


def test_the_page_holds_what_the_script_computes():
    page = PAGE.read_text(encoding="utf-8")
    assert fill(page, Plan()) == page, "run python benchmarks/scale_plan.py --write"


def test_the_inputs_are_those_that_were_measured():
    plan = Plan()
    assert 10_000 < plan.cpu_200 <= plan.cpu_50 < 100_000
    assert 500 < plan.cache_bytes < 700


@pytest.mark.parametrize(
    ("tokens", "machine", "hours"),
    # By hand: rows * tokens / (tokens/s * busy) / 3600
    [(50, "gpu", 10.0), (200, "gpu", 40.0), (50, "cpu", 500.0)],
    ids=["short-gpu", "long-gpu", "short-cpu"],
)
def test_time_is_rows_by_rate(tokens: int, machine: str, hours: float):
    plan = Plan(rows=3.6e8, gpu=1e6, cpu_50=2e4, cpu_200=2e4, busy=0.5)
    assert plan.hours(tokens, machine) == pytest.approx(hours)
    assert plan.hours(tokens, machine, 10) == pytest.approx(hours / 10)


def test_storage_is_rows_by_width_and_bits():
    cells = re.findall(r"\| 1024 \| (.*) \|", tables(Plan(rows=1e6 * 1e6))["vectors"])[0].split(" | ")
    assert [float(cell.replace(",", "")) for cell in cells] == [
        pytest.approx(x, rel=5e-3) for x in (4096, 2048, 1024, 128)
    ]


def test_twice_the_price_is_twice_the_cost_of_the_gpus_alone():
    def costs(plan: Plan) -> list[str]:
        return [line.rsplit("|", 2)[1].strip() for line in tables(plan)["time"].splitlines()[2:]]

    once, twice = costs(Plan(gpu_price=3.0)), costs(Plan(gpu_price=6.0))
    assert once[:2] == twice[:2]
    assert [float(b) for b in twice[2:]] == pytest.approx([2 * float(a) for a in once[2:]], rel=0.02)


def test_a_page_without_a_place_for_a_table_is_refused():
    with pytest.raises(ValueError, match="0 places for the table 'inputs'"):
        fill("no tables", Plan())
