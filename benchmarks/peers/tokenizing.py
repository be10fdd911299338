"""Tokenizers by themselves: the engine's way to token ids, and the library ``tokenizers`` in turns with it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from millpond.engine.tokenize.byte_pairs import PATTERNS
from millpond.engine.tokenize.text_tokenizer import TextTokenizer
from peers.texts import docstrings

LIMIT = 512
# Tokens of a query and of a docstring, as WordPiece counts them.
LENGTHS = {"query": 12, "docstring": 57}
COLUMNS = (
    "tokenizer",
    "text",
    "one text, us",
    "tokenizers",
    "M tokens/s, 1 thread",
    "2 threads",
    "tokenizers, a CPU-s",
)
VOCABULARY = 30_000


def tokenizers(wordpiece: Path, folder: Path) -> dict[str, TextTokenizer]:
    """MiniLM's, and byte-level BPE trained on docstrings: with GPT-2's words, and with those of Qwen under NFC."""
    loaded = {"WordPiece": TextTokenizer.load(wordpiece, lower=False)}
    for name, pattern in (("BPE, GPT-2", 0), ("BPE, Qwen", 1)):
        backend = Tokenizer(models.BPE())
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern == 0)
        backend.pre_tokenizer = level
        if pattern:
            backend.normalizer = normalizers.NFC()
            split = pre_tokenizers.Split(Regex(PATTERNS[pattern]), behavior="isolated")
            backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
        backend.train_from_iterator(docstrings(), trainer)
        file = folder / f"{pattern}.json"
        backend.save(str(file))
        loaded[name] = TextTokenizer(Tokenizer.from_file(str(file)), lower=False, limit=None, file=file)
    return loaded


def measure(tokenizer: TextTokenizer, texts: Sequence[str], *, rounds: int) -> dict[str, Any]:
    """The fastest of the rounds: us for one text in a call, and tokens per second of all in one call.

    But for two threads, seconds are the processor's, so that others on the machine count less.
    """
    backend = tokenizer._backend
    options: dict[str, Any] = {"prompt": "", "limit": LIMIT, "truncate": "end"}
    tokens = sum(map(len, backend.encode_batch_fast(texts)))
    assert sum(len(item.ids) for item in tokenizer.encode(texts, index_of=int, **options)) == tokens
    few = texts[:200]
    with ThreadPoolExecutor(2) as pool:
        halves = [texts[::2], texts[1::2]]

        def split(part: Sequence[str]) -> None:
            tokenizer.encode(part, index_of=int, **options)

        ways: Mapping[str, tuple[Callable[[], Any], Callable[[], float]]] = {
            "one": (lambda: [tokenizer.one(text) for text in few], time.thread_time),
            "one_library": (lambda: [backend.encode(text).ids for text in few], time.thread_time),
            "bulk": (lambda: split(texts), time.thread_time),
            "bulk_two": (lambda: list(pool.map(split, halves)), time.perf_counter),
            "library": (lambda: [each.ids for each in backend.encode_batch_fast(texts)], time.process_time),
        }
        fastest = dict.fromkeys(ways, float("inf"))
        for _ in range(rounds):
            for name, (run, clock) in ways.items():
                start = clock()
                run()
                fastest[name] = min(fastest[name], clock() - start)
    return {
        "texts": len(texts),
        "tokens": tokens,
        "median": statistics.median(len(each) for each in backend.encode_batch_fast(texts)),
        **{name: fastest[name] / len(few) * 1e6 for name in ("one", "one_library")},
        **{name: tokens / fastest[name] for name in ("bulk", "bulk_two", "library")},
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A row for each tokenizer and kind of text."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|" + " ---: |" * len(COLUMNS)]
    for row in rows:
        cells = [row["tokenizer"], f"{row['text']} ({row['median']:g} tokens)"]
        cells += [f"{row[name]:.1f}" for name in ("one", "one_library")]
        cells += [f"{row[name] / 1e6:.1f}" for name in ("bulk", "bulk_two", "library")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
