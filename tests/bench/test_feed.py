"""benchmarks/feed.py: the simulated device keeps its own time, gives the host its real work, and its table adds up."""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

import feed
import pytest
from peers import feed_page
from peers.simulated_device import Run, StoredTokenizer, Timeline, gaps
from tests.tiny import SENTENCES, write_checkpoint
from tokenizers import Tokenizer

TEXTS = [f"{SENTENCES[i % len(SENTENCES)]} {i}" for i in range(900)]


class Clock:
    """A clock that only waiting moves, and :attr:`now`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def test_forwards_run_one_after_the_other():
    clock = Clock()
    timeline = Timeline(0.25, clock=clock, sleep=clock.sleep)
    first, second = timeline.launch(4), timeline.launch(8)
    assert (first.begin, first.end, second.begin, second.end) == (0, 1, 1, 3)
    assert second.launched == 0
    timeline.wait(second)
    assert clock.now == 3
    timeline.wait(first)  # it has ended
    assert clock.now == 3
    clock.now = 5
    assert timeline.launch(4) == Run(launched=5, begin=5, end=6, tokens=4)
    assert gaps(timeline.runs).tolist() == [0, 2]


def test_a_device_without_forwards_has_no_gaps():
    assert len(gaps([])) == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("feed") / "model", "bert")


def options(**given: float) -> argparse.Namespace:
    defaults = {"milliseconds": 0.5, "operators": 0, "tokenizer_rate": 1e9, "rounds": 2, "busy": False}
    return argparse.Namespace(**{**defaults, **given})


def case(model: Path, tokenizer: str) -> feed.Case:
    backend = Tokenizer.from_file(str(model / "tokenizer.json"))
    backend.no_truncation()
    backend.no_padding()
    tokens = sum(min(64, len(backend.encode(text))) for text in TEXTS)
    return feed.Case(lengths="some", tokenizer=tokenizer, texts=TEXTS, tokens=tokens)


@pytest.mark.parametrize("operators", [0, 5], ids=["graphs", "operators"])
@pytest.mark.parametrize("tokenizer", feed.TOKENIZERS)
def test_a_call_runs_through_the_engine(model, tokenizer, operators, monkeypatch):
    """The number of rows and tokens is checked in each round."""
    monkeypatch.setattr(feed, "BUDGET", 1024)
    row = feed.measure(model, case(model, tokenizer), options(operators=operators))
    assert row["batches"] > 5 and row["texts"] == len(TEXTS)
    parts = row["busy"] + row["before"] + row["after"] + row["gaps"]["seconds"]
    assert parts == pytest.approx(row["seconds"])
    assert row["busy"] >= 0.999 * row["tokens"] * 0.0005 / 1024  # those that fill a shape take time, too
    line = feed_page.table([row]).splitlines()[-1]
    assert line.count("|") == len(feed_page.COLUMNS) + 1 and f"| {tokenizer} |" in line


def test_the_thread_beside_it_ends_with_the_measurement(model, monkeypatch):
    monkeypatch.setattr(feed, "BUDGET", 1024)
    threads, start = [], threading.Thread.start

    def started(thread: threading.Thread) -> None:
        threads.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", started)
    feed.measure(model, case(model, "stored"), options(busy=True, rounds=1))
    (busy,) = [
        thread for thread in threads if getattr(thread, "_target", None) is feed.compute or "compute" in thread.name
    ]
    busy.join(timeout=60)
    assert not busy.is_alive()


def test_a_wrong_number_of_tokens_is_noticed(model, monkeypatch):
    monkeypatch.setattr(feed, "BUDGET", 1024)
    right = case(model, "stored")
    wrong = feed.Case(lengths="some", tokenizer="stored", texts=TEXTS, tokens=right.tokens + 1)
    with pytest.raises(AssertionError):
        feed.measure(model, wrong, options())


def test_stored_texts_have_the_tokenizers_ids(model):
    backend = Tokenizer.from_file(str(model / "tokenizer.json"))
    stored = StoredTokenizer(backend, TEXTS, tokens_per_second=1e9)
    found = stored.encode_batch_fast(TEXTS[5:9], add_special_tokens=True)
    assert [encoding.ids for encoding in found] == [backend.encode(text).ids for text in TEXTS[5:9]]
    assert stored.encode(TEXTS[0]).ids == backend.encode(TEXTS[0]).ids


def test_the_page_names_what_was_simulated():
    results = {"milliseconds": 13.0, "operators": 170, "tokenizer_rate": 8e6, "busy": True}
    page = feed_page.page({**results, "rows": []})
    assert "13 ms" in page and "170 operators" in page and "8 M tokens/s" in page
    assert "Another thread" in page
    quiet = feed_page.page({**results, "busy": False, "rows": []})
    assert "Another thread" not in quiet
    assert page.splitlines()[-1].count("---:") == len(feed_page.COLUMNS)
