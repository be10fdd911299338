"""Performance targets, and their comparison with the recorded results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from peers.engines import COMPETITORS

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Target:
    """One performance target.

    Attributes:
        what: Its description.
        result: Name of the file in benchmarks/results/ with the figure; for compare.py also the name for ``--only``.
        least: The number to reach. More is better, unless ``at_most``.
        measured: Computes the figure from the file's results; ``KeyError`` or ``ValueError`` if an engine is missing.
        unit: Written behind the number.
        at_most: Whether less is better.
        isas: The instruction sets of millpond's kernels that it is for; empty: every machine.
    """

    what: str
    result: str
    least: float
    measured: Callable[[Record], float]
    unit: str = "\u00d7"
    at_most: bool = False
    isas: tuple[str, ...] = ()

    def reached(self, value: float) -> bool:
        """Whether ``value`` reaches the target."""
        return value <= self.least if self.at_most else value >= self.least


def speed(rows: Record, peer: str) -> float:
    """millpond's throughput as a multiple of ``peer``'s."""
    return float(rows["millpond"]["tokens_per_second"] / rows[peer]["tokens_per_second"])


def fastest(rows: Record) -> str:
    """Name of the sentence-transformers row with the highest throughput."""
    peers = {name: row["tokens_per_second"] for name, row in rows.items() if name.startswith("st-") and row["equal"]}
    return max(peers, key=lambda name: peers[name])


def peers(rows: Record) -> dict[str, Record]:
    """Rows of the other engines whose results are equal."""
    return {name: row for name, row in rows.items() if not COMPETITORS[name].ours and row["equal"]}


def over_best(rows: Record) -> float:
    """millpond's throughput as a multiple of the fastest peer's."""
    best = max(row["tokens_per_second"] for row in peers(rows).values())
    return float(rows["millpond"]["tokens_per_second"] / best)


def sooner_than_best(rows: Record) -> float:
    """The median time of the fastest peer as a multiple of millpond's."""
    return float(min(row["p50_ms"] for row in peers(rows).values()) / rows["millpond"]["p50_ms"])


def shape(name: str) -> Callable[[Record], float]:
    """millpond's throughput on docstrings in a shape, as a multiple of the fastest peer's."""
    return lambda results: over_best(results["shapes"][name]["docs"]["rows"])


def calls(size: int) -> Callable[[Record], float]:
    """millpond's throughput with ``size`` texts in a call, as a multiple of the fastest peer's."""
    return lambda results: over_best(results["sizes"][str(size)])


def docs(results: Record) -> Record:
    """Rows of the workload ``docs``."""
    rows: Record = results["workloads"]["docs"]["rows"]
    return rows


def gpu(rows: Record, peer: str | None = None) -> float:
    """Million tokens per second; with ``peer``, millpond's speed as a multiple of that engine's fastest row."""
    ours = rows["millpond"]["tokens_per_second"]
    if peer is None:
        return float(ours / 1e6)
    return float(
        ours / max(row["tokens_per_second"] for key, row in rows.items() if key.startswith(peer) and row["equal"])
    )


def on_gpu(results: Record, length: str) -> Record:
    """Rows of BERT-base's shape on a GPU."""
    rows: Record = results["embed"]["bert-base"][length]["rows"]
    return rows


_AMX, _BF16, _AVX2 = ("amx",), ("avx512bf16",), ("avx2",)
TARGETS = (
    Target(
        what="embedding against OpenVINO", result="embed", least=2.0, measured=lambda r: speed(docs(r), "st-openvino")
    ),
    Target(what="embedding against vLLM bf16", result="embed", least=2.4, measured=lambda r: speed(docs(r), "vllm")),
    Target(
        what="embedding against sentence-transformers fp32",
        result="embed",
        least=7.0,
        measured=lambda r: speed(docs(r), "st-fp32"),
    ),
    Target(
        what="embedding with AMX, two cores",
        result="embed",
        least=90.0,
        measured=lambda r: docs(r)["millpond"]["tokens_per_second"] / 1000,
        unit=" k tokens/s",
        isas=_AMX,
    ),
    Target(
        what="embedding with AMX against the fastest peer",
        result="embed",
        least=4.0,
        measured=lambda r: over_best(docs(r)),
        isas=_AMX,
    ),
    Target(
        what="embedding with AVX512-BF16 against vLLM bf16",
        result="embed",
        least=1.7,
        measured=lambda r: speed(docs(r), "vllm"),
        isas=_BF16,
    ),
    Target(
        what="embedding with AVX512-BF16 against OpenVINO",
        result="embed",
        least=2.6,
        measured=lambda r: speed(docs(r), "st-openvino"),
        isas=_BF16,
    ),
    Target(
        what="embedding with AVX2 against the fastest peer",
        result="embed",
        least=2.0,
        measured=lambda r: over_best(docs(r)),
        isas=_AVX2,
    ),
    *(
        Target(
            what=f"{size} texts in a call against the fastest peer",
            result="calls",
            least=least,
            measured=calls(size),
            isas=isas,
        )
        for isas, least in ((_AMX, 3.0), (_BF16, 1.3))
        for size in (4, 16, 64)
    ),
    Target(
        what="reranking against CrossEncoder fp32",
        result="rerank",
        least=4.0,
        measured=lambda r: speed(r["rows"], "st-fp32"),
    ),
    Target(
        what="reranking against CrossEncoder's best backend",
        result="rerank",
        least=1.5,
        measured=lambda r: speed(r["rows"], fastest(r["rows"])),
    ),
    *(
        Target(
            what="reranking against the fastest peer",
            result="rerank",
            least=least,
            measured=lambda r: over_best(r["rows"]),
            isas=isas,
        )
        for isas, least in ((_AMX, 3.0), (_BF16, 2.0))
    ),
    *(
        Target(what=f"{name} against the fastest peer", result="shapes", least=least, measured=shape(name), isas=isas)
        for isas, aims in ((_AMX, (2.5, 2.5, 1.5)), (_BF16, (1.4, 1.4, 1.2)))
        for name, least in zip(("bert-base", "modernbert-base", "qwen3-0.6b"), aims, strict=True)
    ),
    Target(
        what="one short text, p50",
        result="latency",
        least=1.2,
        measured=lambda r: r["rows"]["millpond"]["p50_ms"],
        unit=" ms",
        at_most=True,
        isas=_AMX + _BF16,
    ),
    Target(
        what="one docstring of 50 tokens, p50",
        result="latency",
        least=1.5,
        measured=lambda r: r["docstring"]["rows"]["millpond"]["p50_ms"],
        unit=" ms",
        at_most=True,
        isas=_AMX + _BF16,
    ),
    Target(
        what="one docstring of 50 tokens, p50, against the fastest peer",
        result="latency",
        least=2.0,
        measured=lambda r: sooner_than_best(r["docstring"]["rows"]),
        isas=_AMX + _BF16,
    ),
    Target(
        what="one short text, p50, against OpenVINO",
        result="latency",
        least=1.0,
        measured=lambda r: r["rows"]["st-openvino"]["p50_ms"] / r["rows"]["millpond"]["p50_ms"],
    ),
    Target(
        what="first vector of a process against vLLM",
        result="startup",
        least=5.0,
        measured=lambda r: r["rows"]["vllm"]["seconds"] / r["rows"]["millpond"]["seconds"],
    ),
    Target(
        what="first vector of a process against sentence-transformers",
        result="startup",
        least=1.0,
        measured=lambda r: r["rows"]["st-fp32"]["seconds"] / r["rows"]["millpond"]["seconds"],
    ),
    Target(
        what="64 threads of single docstrings, as a share of one caller's bulk",
        result="load",
        least=0.8,
        measured=lambda r: r["callers"]["docs"]["share_of_bulk"]["threads"],
        unit="",
    ),
    Target(
        what="64 threads of single short texts, as a share of one caller's bulk",
        result="load",
        least=0.8,
        measured=lambda r: r["callers"]["short"]["share_of_bulk"]["threads"],
        unit="",
    ),
    Target(
        what="HTTP at 32 texts a request, 8 connections, as a share of the engine with 8 threads",
        result="serve",
        least=0.85,
        measured=lambda r: r["throughput"]["share_of_engine"]["millpond float, 8"],
        unit="",
    ),
    Target(
        what="a refusal of the overloaded server, p99",
        result="serve",
        least=50.0,
        measured=lambda r: r["overload"]["rows"]["millpond"]["statuses"]["429"]["latency_ms"]["p99"],
        unit=" ms",
        at_most=True,
    ),
    Target(
        what="memory after a million texts, against half of them",
        result="memory",
        least=1.05,
        measured=lambda r: r["last_bytes"] / next(size for done, size in r["samples"] if done >= r["texts"] / 2),
        at_most=True,
    ),
    Target(
        what="cache hits of 384 floats",
        result="cache",
        least=100.0,
        measured=lambda r: r["hits_per_second"]["median"] / 1000,
        unit=" k/s",
    ),
    Target(what="GPU, 50 tokens", result="gpu", least=1.5, measured=lambda r: gpu(on_gpu(r, "50")), unit=" M tokens/s"),
    Target(
        what="GPU, 512 tokens", result="gpu", least=2.0, measured=lambda r: gpu(on_gpu(r, "512")), unit=" M tokens/s"
    ),
    Target(
        what="GPU, mixed lengths, against sentence-transformers",
        result="gpu",
        least=1.3,
        measured=lambda r: gpu(on_gpu(r, "mixed"), "sentence-transformers"),
    ),
    Target(
        what="GPU, reranking, against sentence-transformers fp16",
        result="gpu",
        least=1.5,
        measured=lambda r: gpu(r["rerank"]["mixed"]["rows"], "sentence-transformers"),
    ),
)


def verdicts(results: Mapping[str, Record], *, isa: str | None = None) -> list[tuple[Target, float | None]]:
    """Every target of ``isa`` with its measured value; ``None`` if there is no result, or none for the named engine.

    Args:
        results: Results by name, all of one kind of machine.
        isa: The instruction set of millpond's kernels on it; targets of other ones are left out.
    """
    values: list[tuple[Target, float | None]] = []
    for target in TARGETS:
        if target.isas and isa not in target.isas:
            continue
        try:
            values.append((target, target.measured(results[target.result])))
        except (KeyError, ValueError):  # no result, or the engine is missing or not equal
            values.append((target, None))
    return values
