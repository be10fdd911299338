"""The tables of the GPU benchmark for the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Record = Mapping[str, Any]
PEER = "sentence-transformers, float16, SDPA"


def tables(results: Record) -> str:
    """Throughput by shape and length, the profile before and after, reranking, MaxSim, and what settings do."""
    rates = results["rates"]
    lines = [
        f"The device's own rates in this run: {rates['product_tera_flops']:.0f} TFLOP/s of a large bfloat16 product, "
        f"{rates['copy_giga_bytes_per_second'] / 1000:.1f} TB/s of a large copy, read and written.",
        _embed(results),
        _profile(results),
        _others(results),
        _settings(results["settings"]),
    ]
    return "\n\n".join(lines)


def _embed(results: Record) -> str:
    rows = []
    for shape, lengths in results["embed"].items():
        for length, found in lengths.items():
            ours, peer = found["rows"]["millpond"], found["rows"][PEER]
            before = results["before"]["tokens_per_second"].get(shape, {}).get(length)
            rows.append(
                [
                    f"{shape}, {length}",
                    f"**{ours['tokens_per_second'] / 1e6:.2f} M**",
                    "-" if before is None else f"{before / 1e6:.2f} M",
                    f"{peer['tokens_per_second'] / 1e6:.2f} M",
                    f"{ours['tokens_per_second'] / peer['tokens_per_second']:.1f}\u00d7",
                    f"{ours['share_of_product_rate']:.0%}",
                    f"{ours['mean_cosine']:.5f}",
                ]
            )
    head = ["shape, tokens of a text", "millpond, tokens/s", "before the kernels", "sentence-transformers fp16"]
    return _table([*head, "ratio", "of the product rate", "cosine to float32"], rows)


def _profile(results: Record) -> str:
    rows = []
    for shape, lengths in results["profile"].items():
        for length, after in lengths.items():
            before = results["before"]["profile"][shape][length]
            rows.append([f"{shape}, {length}", "before", *_parts(before)])
            rows.append(["", "after", *_parts(after)])
    head = ["shape, tokens of a text", "", "products", "attention", "norms", "all else", "busy"]
    return "Milliseconds of the device for 400,000 tokens, by kind of kernel:\n\n" + _table(head, rows)


def _parts(found: Record) -> list[str]:
    kinds = found["kinds_ms"]
    named = [kinds.get(name, 0.0) for name in ("products", "attention", "norms")]
    return [*(f"{ms:.0f}" for ms in (*named, sum(kinds.values()) - sum(named))), f"{found['busy_share']:.0%}"]


def _others(results: Record) -> str:
    rows = []
    for length, found in results["rerank"].items():
        ours, peer = (found["rows"][name]["median_seconds"] * 1000 for name in ("millpond", PEER))
        what = f"reranking {found['documents']} passages of {length} tokens (BERT-base)"
        rows.append([what, f"{ours:.1f} ms", f"sentence-transformers {peer:.1f} ms, {peer / ours:.1f}\u00d7"])
    copy = results["rates"]["copy_giga_bytes_per_second"]
    for codec, found in results["maxsim"].items():
        before = results["before"]["maxsim_giga_bytes_per_second"][codec]
        rate = found["giga_bytes_per_second"]
        what = f"MaxSim, 32 query tokens, {found['documents']:,} documents of 159 tokens, {codec}"
        beside = f"{rate / copy:.0%} of the copy; before the kernel {before:.0f} GB/s"
        rows.append([what, f"{found['median_seconds'] * 1000:.1f} ms, {rate:,.0f} GB/s", beside])
    for length, found in results["callers"].items():
        one, many = found["tokens_per_second"].values()
        what = f"64 threads of single texts of {length} tokens (BERT-base)"
        rows.append([what, f"{many / 1e6:.2f} M tokens/s", f"{many / one:.0%} of one caller"])
    call, ingestion = results["ingest"]["tokens_per_second"].values()
    what = "an ingestion of texts of 177 tokens, its rows discarded (BERT-base)"
    rows.append([what, f"{ingestion / 1e6:.2f} M tokens/s", f"{ingestion / call:.0%} of one call"])
    return _table(["what", "millpond", "beside"], rows)


def _settings(found: Record) -> str:
    rows = [[name, "; ".join(f"{key}: {_number(value)}" for key, value in row.items())] for name, row in found.items()]
    return "What settings and choices do, BERT-base's shape:\n\n" + _table(["what", "measured"], rows)


def _number(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['tokens_per_second'] / 1e6:.2f} M tokens/s, {value['processor_seconds']} CPU s"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
