"""Memory over the number of texts: a generator of a million short texts through ``embed_iter``, in one process.

    python benchmarks/memory.py [--smoke] [--texts 1000000]

The resident memory is read after every ``--every`` texts. The result is its growth: megabytes per 100,000 texts, by a
straight line through the second half, when the memory that every engine needs is already allocated.
"""

from __future__ import annotations

import argparse
import logging
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from compare import show
from peers import curves
from peers.environments import cache_folder
from peers.shapes import Shapes
from record import RESULTS, record

from millpond import Engine

# Each is one token in MiniLM's vocabulary: six words are eight tokens with the special ones.
WORDS = (
    "water wheel mill pond stone river grain flour miller bridge gate dam canal stream field road house barn "
    "cart horse rope sack bread oven fire smoke wind rain snow ice summer winter spring autumn morning evening "
    "night day year hour north south east west upper lower left right old new small large dark light cold warm "
    "deep wide high low first last"
).split()
MOST_WORDS = 6


def texts(count: int) -> Iterator[str]:
    """Generate ``count`` texts of two to six words."""
    chance = random.Random(0)
    for _ in range(count):
        yield " ".join(chance.choices(WORDS, k=chance.randint(2, MOST_WORDS)))


def resident() -> int:
    """Resident bytes of this process."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS:"))


def measure(model: Path, *, count: int, every: int) -> dict[str, Any]:
    """Samples of the resident memory, and the slope of a line through their second half."""
    started = time.perf_counter()
    with Engine(model) as engine:
        longest = max(len(ids) for ids in engine.tokenizer([" ".join(WORDS[:MOST_WORDS])])["input_ids"])
        samples = [(0, resident())]
        for done, _ in enumerate(engine.embed_iter(texts(count)), 1):
            if done % every == 0:
                samples.append((done, resident()))
        width = engine.spec.dimensions
    counts, sizes = (np.array(column, dtype=float) for column in zip(*samples, strict=True))
    late = counts >= count / 2
    slope = float(np.polyfit(counts[late], sizes[late], 1)[0]) if late.sum() > 1 else float("nan")
    return {
        "texts": count,
        "most_tokens": longest,
        "seconds": round(time.perf_counter() - started, 1),
        "vectors_bytes": 4 * width * count,
        "loaded_bytes": int(sizes[0]),
        "most_bytes": int(sizes.max()),
        "last_bytes": int(sizes[-1]),
        "megabytes_per_100k_texts": round(slope * 1e5 / 1e6, 3),
        "samples": [[int(embedded), int(size)] for embedded, size in samples],
    }


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few thousand texts, not recorded")
    parser.add_argument("--texts", type=int, default=1_000_000)
    parser.add_argument("--every", type=int, default=5_000, help="texts between two samples")
    options = parser.parse_args()
    if options.smoke:
        options.texts, options.every = 4_000, 500
    logging.getLogger("millpond").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        shapes = Shapes(Path(folder) / "models" if options.smoke else cache_folder() / "models")
        results = measure(shapes.folder("minilm"), count=options.texts, every=options.every)
        print(curves.memory_table(results))
        target = Path(folder) / "results" if options.smoke else RESULTS
        record("memory", results, folder=target)
        show(target)


if __name__ == "__main__":
    main()
