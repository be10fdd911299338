"""How fast the host feeds a fast device: tokens per second, and where a simulated device has nothing to do.

    python benchmarks/feed.py [--smoke] [--lengths 52,512,mixed] [--tokenizers stored,real] [--rounds 5]
                              [--tokens 4000000] [--milliseconds 13] [--operators 0] [--busy] [--alone]

The device takes so many milliseconds for 32,768 tokens and none of the processor's time: its batches end when a clock
says so, in order, two launched at a time, and each text has a row of 768 floats. All else is the engine's own, from
texts to vectors. ``stored``: the texts were tokenized before, and the tokenizer waits as long as it would take on other
cores, so that the engine is measured by itself; ``real``: it tokenizes on the cores of this machine. ``--operators``
runs so many small operators for each batch in place of a captured graph. ``--busy``: another thread of the program
computes in Python meanwhile. ``--alone``: no device, and only the tokenizers: one text in a call, and many, against the
library ``tokenizers``. The fastest of the rounds counts.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from peers import feed_page, tokenizing
from peers.environments import cache_folder
from peers.shapes import Shapes
from peers.simulated_device import SimulatedModel, StoredTokenizer, Timeline, gaps
from peers.texts import Texts
from record import record

from millpond import PoolingParams
from millpond.checkpoints.resolve import Source
from millpond.engine.dispatcher import Dispatcher
from millpond.engine.execute.runner import Runner
from millpond.engine.loading import Replicas, read_model
from millpond.engine.submission import Submission
from millpond.values.config import EngineConfig

BUDGET = 32_768  # tokens of a batch: an engine's default on a GPU
WIDTH = 768
LIMIT = 512
TOKENIZERS = ("stored", "real")


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is measured.

    Attributes:
        lengths: Tokens of a text, or ``mixed``: 10 to 500.
        tokenizer: One of ``TOKENIZERS``.
        texts: The texts of the call.
        tokens: Their tokens.
    """

    lengths: str
    tokenizer: str
    texts: Sequence[str]
    tokens: int


def main() -> None:
    """Measure, print and record."""
    options = arguments()
    with tempfile.TemporaryDirectory() as folder:
        model = Shapes(Path(folder) if options.smoke else cache_folder() / "models").folder("minilm")
        source = Texts(model / "tokenizer.json", data=None)
        if options.alone:
            return split_alone(model, Path(folder), source, options)
        rows = []
        for lengths in options.lengths:
            texts, tokens = texts_of(source, lengths, options.tokens)
            for tokenizer in options.tokenizers:
                case = Case(lengths=lengths, tokenizer=tokenizer, texts=texts, tokens=tokens)
                rows.append(measure(model, case, options))
                print(feed_page.table(rows[-1:]), file=sys.stderr)
    results = {
        "milliseconds": options.milliseconds,
        "operators": options.operators,
        "tokenizer_rate": options.tokenizer_rate,
        "busy": options.busy,
        "rows": rows,
    }
    print(feed_page.page(results))
    if not options.smoke:
        print(record("feed", results))


def split_alone(model: Path, folder: Path, source: Texts, options: argparse.Namespace) -> None:
    """Measure the tokenizers, print and record."""
    rows = []
    for name, tokenizer in tokenizing.tokenizers(model, folder).items():
        for kind, length in tokenizing.LENGTHS.items():
            texts, _ = texts_of(source, str(length), options.tokens // 10)
            row = tokenizing.measure(tokenizer, texts, rounds=options.rounds)
            rows.append({"tokenizer": name, "text": kind, **row})
    print(tokenizing.table(rows))
    if not options.smoke:
        print(record("tokenizing", {"rows": rows}))


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few thousand texts once, not recorded")
    parser.add_argument("--lengths", type=lambda text: text.split(","), default=["52", "512", "mixed"])
    parser.add_argument("--tokenizers", type=lambda text: text.split(","), default=list(TOKENIZERS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4_000_000, help="of a call, about")
    parser.add_argument("--milliseconds", type=float, default=13.0, help=f"of the device for {BUDGET:,} tokens")
    parser.add_argument(
        "--operators", type=int, default=0, help="small operators for each batch, and no graphs; 0: graphs"
    )
    parser.add_argument("--tokenizer-rate", type=float, default=8e6, help="tokens per second of the stored tokenizer")
    parser.add_argument("--busy", action="store_true", help="beside a thread that computes in Python")
    parser.add_argument("--alone", action="store_true", help="only the tokenizers, against the library")
    options = parser.parse_args()
    if unknown := set(options.tokenizers) - set(TOKENIZERS):
        parser.error(f"--tokenizers has no {', '.join(sorted(unknown))}; choose of {', '.join(TOKENIZERS)}")
    if options.smoke:
        options.rounds, options.tokens = 1, 200_000
    return options


def texts_of(source: Texts, lengths: str, tokens: int) -> tuple[list[str], int]:
    """Texts of the named lengths with about so many tokens together, and their tokens."""
    chance = random.Random(lengths)
    wanted: list[int] = []
    while sum(wanted) < tokens:
        wanted += [chance.randint(10, 500) if lengths == "mixed" else int(lengths) for _ in range(100)]
    texts = source.pieces(wanted, chance)
    return texts, sum(min(LIMIT, len(encoding)) for encoding in source.tokenizer.encode_batch_fast(texts))


def measure(model: Path, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """The fastest of several rounds of one call; all rounds are of one engine."""
    loaded = read_model(EngineConfig(model=str(model), device="cpu", hf_overrides={"hidden_size": WIDTH}))
    if case.tokenizer == "stored":
        texts = loaded.encoder.texts
        folded = [texts.fold(text) for text in case.texts]
        texts._backend = StoredTokenizer(texts._backend, folded, tokens_per_second=options.tokenizer_rate)
    timeline = Timeline(options.milliseconds / 1000 / BUDGET)
    graphs = options.operators == 0
    device = SimulatedModel(timeline, width=WIDTH, longest=LIMIT, graphs=graphs, operators=options.operators)
    source = Source(folder=model, name=model.name, revision=None)
    replicas = Replicas(model=loaded, source=source, runners=(Runner(device),), dtype="float16")
    dispatcher = Dispatcher(replicas, budget=BUDGET, max_queue=1 << 18, cache=None)
    submission = Submission(loaded, dispatcher)
    over = threading.Event()
    if options.busy:
        threading.Thread(target=compute, args=(over,), daemon=True).start()
    try:  # the first round captures graphs
        rounds = [one_round(submission, timeline, case) for _ in range(options.rounds + 1)][1:]
    finally:
        over.set()
        dispatcher.close()
    return {
        "lengths": case.lengths,
        "tokenizer": case.tokenizer,
        "texts": len(case.texts),
        "tokens": case.tokens,
        **max(rounds, key=lambda one: one["tokens_per_second"]),
    }


def compute(over: threading.Event) -> None:
    """Keep the interpreter busy, and let go of its lock only when asked to."""
    while not over.is_set():
        pass


def one_round(submission: Submission, timeline: Timeline, case: Case) -> dict[str, Any]:
    """One call: its tokens per second, and when the device had nothing to do."""
    timeline.runs.clear()
    processor, start = time.process_time(), time.perf_counter()
    output = submission.run("embed", case.texts, PoolingParams(), False)
    seconds, processor = time.perf_counter() - start, time.process_time() - processor
    assert output.embeddings.shape == (len(case.texts), WIDTH) and np.isfinite(output.embeddings).all()
    assert output.usage.prompt_tokens == case.tokens
    runs, pauses = timeline.runs, gaps(timeline.runs)
    return {
        "seconds": seconds,
        "tokens_per_second": round(case.tokens / seconds),
        "tokens_per_second_between": round(case.tokens / (runs[-1].end - runs[0].begin)),
        "processor_seconds": processor,
        "busy": sum(run.end - run.begin for run in runs),
        "before": runs[0].begin - start,
        "after": start + seconds - runs[-1].end,
        "gaps": {
            "count": int((pauses > 0).sum()),
            "seconds": float(pauses.sum()),
            "median": float(np.median(pauses)) if len(pauses) else 0.0,
            "longest": float(pauses.max(initial=0.0)),
        },
        "batches": len(runs),
        "tokens_per_batch": round(sum(run.tokens for run in runs) / len(runs)),
    }


if __name__ == "__main__":
    main()
