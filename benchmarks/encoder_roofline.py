"""The native encoder beside the processor's peak: seconds, Gop/s and share of the peak of each kind of step.

    python benchmarks/encoder_roofline.py [--smoke] [--shapes minilm,bert-base,...] [--dtypes bfloat16,float32]
                                          [--rounds 9] [--texts 256]

Docstrings through the whole forward on one thread. The peak is what multiply-add instructions of the same instruction
set do on registers alone, measured in the same minute; it needs a C++ compiler. Of each block of tokens the fastest of
all rounds counts. MILLPOND_ISA caps the instruction set.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from peers import roofline_page
from peers.environments import cache_folder
from peers.peak import NoPeakError, peak_of, peaks
from peers.shapes import LIMITS, Shapes
from peers.texts import Texts
from processor import processor
from record import record

from millpond import Engine
from millpond.backends.native import structs
from millpond.backends.native.encoder import bounds_of
from millpond.backends.native.model import NativeModel
from millpond.native.library import isa

SHAPES = {"minilm": 256, "bert-base": 96, "modernbert-base": 96, "qwen3-0.6b": 48}  # texts
DTYPES = ("bfloat16", "float32")
# The entries of EncodeCall.timings: the kinds of steps, then products that are not to heads, then the reading.
STEPS = ("embeddings", "norms", "qkv product", "rotation", "attention", "feed forward", "out product", "reading")
_EMBED, _NORM, _QKV, _HEADS, _ATTENTION, _FEED, _OUT, _READING = range(len(STEPS))


def main() -> int:
    """Measure, print and record."""
    options = arguments()
    instructions = isa()
    if instructions is None:
        print("the compiled kernels were not built, or are switched off: nothing was measured", file=sys.stderr)
        return 1
    shapes: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            measured = peaks(processor()["instruction_sets"], folder)
        except NoPeakError as error:
            print(f"the peak was not measured: {error}", file=sys.stderr)
            measured = {}
        models = Shapes(folder / "models" if options.smoke else cache_folder() / "models")
        for shape in options.shapes:
            texts = Texts(models.folder(shape) / "tokenizer.json", data=None)
            count = 8 if options.smoke else options.texts or SHAPES[shape]
            load = texts.workload("docs", limit=LIMITS[shape], count=count)
            ids = [texts.tokenizer.encode(text).ids[: LIMITS[shape]] for text in load.texts]
            for dtype in options.dtypes:
                row = forward(models.folder(shape), dtype, ids, rounds=1 if options.smoke else options.rounds)
                if row is None:
                    print(f"{shape} {dtype}: not a native forward on this processor")
                    continue
                compare(row, measured, instructions, dtype)
                shapes.setdefault(shape, {})[dtype] = row
    if not shapes:
        print("no shape has a native forward here: nothing was measured", file=sys.stderr)
        return 1
    results = {"isa": instructions, "peaks": measured, "shapes": shapes}
    print(roofline_page.table(results))
    if not options.smoke:
        print(record("encoder_roofline", results))
    return 0


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few texts through MiniLM, one round, not recorded")
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=list(SHAPES), metavar="SHAPE,...")
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=list(DTYPES), metavar="DTYPE,...")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--texts", type=int, default=None, help="texts of every shape")
    options = parser.parse_args()
    if unknown := set(options.shapes) - set(SHAPES):
        parser.error(f"--shapes has no {', '.join(sorted(unknown))}; choose of {', '.join(SHAPES)}")
    if unknown := set(options.dtypes) - set(DTYPES):
        parser.error(f"--dtypes has no {', '.join(sorted(unknown))}; choose of {', '.join(DTYPES)}")
    if options.smoke:
        options.shapes = ["minilm"]
    return options


def forward(model: Path, dtype: str, ids: Sequence[Sequence[int]], *, rounds: int) -> dict[str, Any] | None:
    """Seconds and operations of each kind of step, on one thread; None if the forward is not native."""
    with Engine(model, dtype=dtype, device="cpu") as engine:
        model = engine._replicas.runner.model
        if not isinstance(model, NativeModel):
            return None
        backbone = model.encoder
        lengths = np.array([len(one) for one in ids])
        blocks = []
        for start, end in cut(lengths, backbone.block):
            flat = np.concatenate([np.array(one, dtype=np.int32) for one in ids[start:end]])
            blocks.append((flat, bounds_of(lengths[start:end])))
        # The least of each block, and not of whole passes: other work on the machine seldom spares a whole pass.
        least = np.full(len(blocks), np.inf)
        timings = np.zeros((len(blocks), len(STEPS)))
        for _ in range(rounds + 1):  # the first one warms up
            for i, (flat, bounds) in enumerate(blocks):
                parts = np.zeros(len(STEPS))
                begin = time.perf_counter()
                backbone.encode(flat, bounds, rows="mean", threads=1, timings=parts)
                seconds = time.perf_counter() - begin
                if seconds < least[i]:
                    least[i], timings[i] = seconds, parts
        count = operations(backbone.plan.model, lengths)
        steps = {
            name: {"seconds": float(taken), "operations": int(done)}
            for name, taken, done in zip(STEPS, timings.sum(0), count, strict=True)
            if taken > 0
        }
        tokens, taken = int(lengths.sum()), float(least.sum())
        whole = {"seconds": taken, "operations": int(count.sum()), "tokens_per_second": round(tokens / taken)}
        return {"tokens": tokens, "texts": len(ids), "block": backbone.block, "steps": steps, **whole}


def cut(lengths: Sequence[int] | npt.NDArray[np.int64], block: int) -> list[tuple[int, int]]:
    """Texts [start, end) of each block as a forward cuts them: at most ``block`` tokens, or one longer text."""
    cuts, start, tokens = [], 0, 0
    for i, length in enumerate(map(int, lengths)):
        if i > start and tokens + length > block:
            cuts.append((start, i))
            start, tokens = i, 0
        tokens += length
    return [*cuts, (start, len(lengths))]


def operations(model: structs.Model, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Multiplications and additions of the products of each kind of step, on texts of these lengths."""
    tokens = int(lengths.sum())
    counts = np.zeros(len(STEPS), dtype=np.int64)
    for i in range(model.count):
        step = model.steps[i]
        if step.kind == structs.PRODUCT:
            counts[_QKV if step.target == 0 else _OUT] += 2 * tokens * step.weight.out * step.weight.in_
        elif step.kind == structs.FEED:
            weights = step.weight.out * step.weight.in_ + step.down.out * step.down.in_
            counts[_FEED] += 2 * tokens * weights
        elif step.kind == structs.ATTENTION:
            counts[_ATTENTION] += 4 * step.heads * step.dim * pairs(lengths, step.before, step.after)
    return counts


def pairs(lengths: npt.NDArray[np.int64], before: int, after: int) -> int:
    """How many keys all queries attend to, of ``before`` positions back and ``after`` ahead."""
    total = 0
    for length in map(int, lengths):
        at = np.arange(length)
        total += int((np.minimum(at, before) + np.minimum(length - 1 - at, after) + 1).sum())
    return total


def compare(row: dict[str, Any], measured: dict[str, float], instructions: str, dtype: str) -> None:
    """Add Gop/s, and the share of the peak where it is known, to the row and its steps."""
    peak = peak_of(measured, instructions, dtype)
    for part in (row, *row["steps"].values()):
        if part["operations"]:
            part["gops"] = round(part["operations"] / part["seconds"] / 1e9, 1)
            if peak:
                part["of_peak"] = round(part["gops"] / peak, 3)
    if peak:
        row["peak_gops"] = peak


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
