"""Tables of the results of `benchmarks/serve.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
MISSING = "-"


def table(results: Record) -> str:
    """One table for each measured section of the server benchmark."""
    parts = {"throughput": _throughput, "singles": _singles, "overload": _overload, "routes": _routes}
    blocks = [part(results[name]) for name, part in parts.items() if name in results]
    if results.get("left_out"):
        blocks.append("Left out: " + "; ".join(f"{name} ({why})" for name, why in results["left_out"].items()) + ".")
    return "\n\n".join(blocks)


def _throughput(results: Record) -> str:
    rates, shares = results["texts_per_second"], results["share_of_engine"]
    ways = list(dict.fromkeys(name.rpartition(", ")[0] for name in rates if name != "engine, one call"))
    callers = results["callers"]
    head = [f"texts/s, {results['texts_per_request']} per request (share of the engine)"]
    head += [f"{count} caller{'s' if count > 1 else ''}" for count in callers]
    rows = []
    for way in ways:
        cells = []
        for count in callers:
            name = f"{way}, {count}"
            share = f" ({shares[name]:.0%})" if name in shares else ""
            cells.append(f"{rates[name]:,.0f}{share}" if name in rates else MISSING)
        rows.append([way, *cells])
    note = (
        f"Docstrings, mean length {results['mean_tokens']:.0f} tokens. All of them in one engine call: "
        f"{rates['engine, one call']:,.0f} texts/s."
    )
    return f"{_markdown(head, rows)}\n\n{note}"


def _singles(results: Record) -> str:
    head = [f"one short text ({results['mean_tokens']:.0f} tokens), ms", "p50", "p95", "p99"]
    rows = [
        [name, *(f"{row[key]:.2f}" for key in ("p50", "p95", "p99"))] for name, row in results["milliseconds"].items()
    ]
    return _markdown(head, rows)


def _routes(results: Record) -> str:
    rates = results["requests_per_second"]
    sizes = list(results["mean_tokens"])
    routes = list(dict.fromkeys(name.rpartition(", ")[0] for name in rates))
    head = [f"requests/s, {results['connections']} connections"]
    head += [
        f"{size} text{'s' if int(size) > 1 else ''} of {results['mean_tokens'][size]:.0f} tokens" for size in sizes
    ]
    return _markdown(head, [[route, *(f"{rates[f'{route}, {size}']:,.1f}" for size in sizes)] for route in routes])


def _overload(results: Record) -> str:
    head = [f"load: {results['offered']:g} times the capacity", *results["rows"]]

    def row(label: str, *path: str, unit: str = "") -> list[str]:
        cells = []
        for value in results["rows"].values():
            for key in path:
                value = value.get(key) if value is not None else None
            cells.append(MISSING if value is None else f"{value:,.1f}{unit}")
        return [label, *cells]

    rows = [
        row("requests/s offered", "offered_per_second"),
        row("requests/s served", "served_per_second"),
        row("served, p50 ms", "statuses", "200", "latency_ms", "p50"),
        row("served, p99 ms", "statuses", "200", "latency_ms", "p99"),
        row("refused (429)", "statuses", "429", "requests"),
        row("refused, p50 ms", "statuses", "429", "latency_ms", "p50"),
        row("refused, p99 ms", "statuses", "429", "latency_ms", "p99"),
        row("refused, slowest ms", "statuses", "429", "latency_ms", "max"),
    ]
    for state in ("alone", "at_full_load", "overloaded"):
        for key in ("p50", "p99", "p100"):
            label = f"/health {state.replace('_', ' ')}, {'slowest' if key == 'p100' else key} ms"
            rows.append(row(label, "health_ms", state, key))
    note = f"In millpond at most {results['max_queue']} texts wait; the queue of vLLM has no limit."
    return f"{_markdown(head, rows)}\n\n{note}"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
