"""Memory of an ingestion does not grow with the number of rows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.tiny import write_checkpoint

from millpond import Engine
from millpond.ingest import Record, ingest

GROWTH = 48 << 20  # bytes; without trimming, this run grows by 100 MB and more


class DiscardSink:
    """Counts rows."""

    dimensions = None
    rows = 0

    def prepare(self, spec: Any) -> None: ...

    def write(self, batch: Any) -> None:
        self.rows += len(batch.ids)

    def close(self) -> None: ...


def resident() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
def test_memory_is_level_from_100_000_rows_on(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    samples: dict[int, int] = {}

    def records() -> Iterator[Record]:
        for number in range(300_000):
            if number % 5000 == 0:
                samples[number] = resident()
            yield Record(str(number), f"{number % 977} {number % 31} stone")

    sink = DiscardSink()
    with Engine(folder, device="cpu", dtype="float32") as engine:
        ingest(records(), engine=engine, sink=sink, show_progress=False)
    assert sink.rows == 300_000
    before = max(size for number, size in samples.items() if 50_000 <= number <= 100_000)
    after = max(size for number, size in samples.items() if number >= 250_000)
    assert after - before < GROWTH
