"""The tables of docs/scale.md: a billion rows on paper, from measured rates and a few assumptions.

::

    python benchmarks/scale_plan.py                                    # the page's tables
    python benchmarks/scale_plan.py --rows 2e8 --gpu-price 2.5 --bytes-per-token 5.1
    python benchmarks/scale_plan.py --write                            # puts them into the page
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/scale.md"
RESULTS = Path(__file__).parent / "results"

WIDTHS = (128, 256, 384, 768, 1024)
BITS = {"float32": 32, "float16": 16, "int8, uint8": 8, "bit": 1}
TOKENS = (50, 200)
TERABYTE = 1e12


def _result(name: str) -> dict[str, object]:
    content: dict[str, dict[str, object]] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content["results"]


def _tokens_per_second(workload: str) -> float:
    workloads = _result("embed")["workloads"]
    return float(workloads[workload]["rows"]["millpond"]["tokens_per_second"])  # type: ignore[index]


def _cache_overhead() -> float:
    """Bytes of a cached row beside its floats: the larger of two widths."""
    return max(
        float(result["bytes_per_row"]) - 4 * int(result["width"])  # type: ignore[arg-type, call-overload]
        for result in (_result("cache"), _result("cache-1024"))
    )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the tables follow from.

    Attributes:
        rows: Rows to store.
        cpu_50: Tokens per second of two cores, texts of about 50 tokens.
        cpu_200: The same, of about 180 tokens.
        gpu: Tokens per second of a GPU.
        busy: Share of the time in which an engine computes.
        cpu_price: Price of two cores for an hour.
        gpu_price: Price of a GPU's machine for an hour.
        driver_us: Microseconds of the driver per row.
        bytes_per_token: Bytes of text per token.
        id_bytes: Bytes of a record's id.
        metadata_bytes: Bytes of a row's metadata, as JSON.
        row_bytes: The row's own id, the text's hash and the names of the fields.
        graph_bytes: Edges of an HNSW graph with ``m=16``.
        cache_bytes: Of a cached row, beside its floats.
        journal_bytes: Of a mark, beside the id.
        float_text: Bytes of a float in a request of JSON.
        batch: Rows of a batch.
        start: Seconds until a new worker has its model.
    """

    rows: float = 1e9
    cpu_50: float = _tokens_per_second("docs")
    cpu_200: float = _tokens_per_second("passages")
    gpu: float = 2.16e6
    busy: float = 0.9
    cpu_price: float = 0.08
    gpu_price: float = 4.0
    driver_us: float = 58.0
    bytes_per_token: float = 4.5
    id_bytes: float = 16
    metadata_bytes: float = 100
    row_bytes: float = 150
    graph_bytes: float = 140
    cache_bytes: float = _cache_overhead()
    journal_bytes: float = 31
    float_text: float = 20
    batch: float = 2048
    start: float = 10

    def rate(self, tokens: int, machine: str) -> float:
        """Rows per second of one engine."""
        per_second = self.gpu if machine == "gpu" else self.cpu_50 if tokens <= 100 else self.cpu_200
        return per_second * self.busy / tokens

    def hours(self, tokens: int, machine: str, count: int = 1) -> float:
        """Hours of ``count`` engines."""
        return self.rows / (self.rate(tokens, machine) * count) / 3600

    def payload(self, tokens: int) -> float:
        """Bytes of a row without its vectors."""
        return tokens * self.bytes_per_token + self.id_bytes + self.metadata_bytes + self.row_bytes


def tables(plan: Plan) -> dict[str, str]:
    """The tables by name, as Markdown."""
    price = {"cpu": plan.cpu_price, "gpu": plan.gpu_price}
    names = {"cpu": "2 cores (measured)", "gpu": "H200 (measured)"}
    kinds = [(kind, tokens) for kind in names for tokens in TOKENS]
    time = _table(
        ["engine", "tokens a row", "rows/s", "machine hours", "16 of them", "64 of them", "cost"],
        [
            [
                names[kind],
                str(tokens),
                _number(plan.rate(tokens, kind)),
                _number(plan.hours(tokens, kind)),
                _days(plan.hours(tokens, kind, 16)),
                _days(plan.hours(tokens, kind, 64)),
                _number(plan.hours(tokens, kind) * price[kind]),
            ]
            for kind, tokens in kinds
        ],
    )
    vectors = _table(
        ["width", *BITS],
        [[str(width), *(_terabytes(plan.rows * width * bits / 8) for bits in BITS.values())] for width in WIDTHS],
    )
    rest = _table(
        ["beside the vectors", "bytes a row", "TB"],
        [
            [name, _number(size), _terabytes(plan.rows * size)]
            for name, size in (
                *((f"ids, text and metadata, {tokens} tokens", plan.payload(tokens)) for tokens in TOKENS),
                ("HNSW graph, m=16", plan.graph_bytes),
                ("journal (driver)", plan.journal_bytes + plan.id_bytes),
                *((f"cache, width {width} (workers)", 4 * width + plan.cache_bytes) for width in (384, 768, 1024)),
            )
        ],
    )
    rate = plan.rate(50, "gpu")
    network = _table(
        ["rows of 50 tokens", "bytes a row", "MB/s, one H200"],
        [
            [name, _number(size), _number(rate * size / 1e6)]
            for name, size in (
                ("source to driver, driver to worker, each", plan.payload(50)),
                ("worker to database, width 384, binary (gRPC, COPY)", 4 * 384 + plan.payload(50)),
                ("worker to database, width 384, JSON", plan.float_text * 384 + plan.payload(50)),
            )
        ],
    )
    lost = 2 * plan.batch
    failures = _table(
        ["what dies", "rows computed again, at most", "seconds, 2 cores", "seconds, H200"],
        [
            [
                "a worker",
                _number(lost),
                *(_number(plan.start + lost / plan.rate(50, kind)) for kind in ("cpu", "gpu")),
            ],
            [
                "a worker, with a cache on its machine",
                "those not committed",
                *(_number(plan.start) for _ in range(2)),
            ],
            [
                "the driver, with 16 workers",
                _number(16 * lost),
                *(_number(plan.start + lost / plan.rate(50, kind)) for kind in ("cpu", "gpu")),
            ],
        ],
    )
    driver = 1e6 / plan.driver_us
    drivers = _table(
        ["one driver", ""],
        [
            ["rows/s", _number(driver)],
            ["hours for all rows", _number(plan.rows / driver / 3600)],
            *(
                [f"{names[kind]}, {tokens} tokens: engines that it feeds", _number(driver / plan.rate(tokens, kind))]
                for kind, tokens in kinds
            ),
        ],
    )
    inputs = _table(["input", "value"], [[each.name, _number(getattr(plan, each.name))] for each in fields(plan)])
    return {
        "inputs": inputs,
        "time": time,
        "driver": drivers,
        "vectors": vectors,
        "rest": rest,
        "network": network,
        "failures": failures,
    }


def fill(page: str, plan: Plan) -> str:
    """The page with these tables."""
    for name, table in tables(plan).items():
        pattern = rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)"
        page, count = re.subn(
            pattern, lambda match, text=table: match[1] + text + "\n" + match[2], page, flags=re.DOTALL
        )  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"the page has {count} places for the table {name!r}")
    return page


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _terabytes(size: float) -> str:
    return f"{size / TERABYTE:.3g}"


def _days(hours: float) -> str:
    return f"{hours:,.1f} h" if hours < 48 else f"{hours / 24:,.0f} days"


def main() -> None:
    """Print the tables, or write them into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/scale.md")
    parser.add_argument("--smoke", action="store_true", help="the same: this takes no time")
    for each in fields(Plan):
        parser.add_argument(f"--{each.name.replace('_', '-')}", type=float, default=each.default)
    arguments = vars(parser.parse_args())
    write = arguments.pop("write") and not arguments["smoke"]
    del arguments["smoke"]
    plan = Plan(**arguments)
    if write:
        PAGE.write_text(fill(PAGE.read_text(encoding="utf-8"), plan), encoding="utf-8")
    else:
        for name, table in tables(plan).items():
            print(f"{name}\n\n{table}\n")


if __name__ == "__main__":
    main()
