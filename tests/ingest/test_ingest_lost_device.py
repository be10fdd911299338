"""An ingestion whose engine loses a device: the others go on, and without one the run stops and rejects no record."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.ingest.memory_sink import MemoryClient, MemorySink
from tests.recording import Recording
from tests.tiny import write_checkpoint

from millpond import DeviceLostError, Engine
from millpond.ingest import Record, ingest
from tests import recording

pytestmark = pytest.mark.torch

RECORDS = [Record(f"{i}", f"text {i} about the mill and the pond", {}) for i in range(300)]


@pytest.fixture
def backends(monkeypatch: pytest.MonkeyPatch) -> list[Recording]:
    return recording.backends_of_engines(monkeypatch)


def lose_after(backend: Recording, uploads: int) -> None:
    left = uploads

    def fault(operation: str) -> None:
        nonlocal left
        left -= operation == "upload"
        if left < 0:
            backend.lost = torch.AcceleratorError("CUDA error: unspecified launch failure")
            raise backend.lost

    backend.fault = fault


def test_the_other_device_embeds_the_rest(backends: list[Recording], tmp_path: Path) -> None:
    client = MemoryClient()
    folder = write_checkpoint(tmp_path / "model", "bert")
    with Engine(folder, device=["cpu", "cpu"], dtype="float32", max_batch_tokens=128) as engine:
        lose_after(backends[0], 1)
        while not engine.lost_devices:  # which of the two takes a batch is chance
            report = ingest(RECORDS, engine=engine, sink=MemorySink(client, "docs"), show_progress=False)
    assert len(client["docs"][1]) == len(RECORDS)
    assert report.failed == 0


def test_without_a_device_the_run_stops_and_no_record_is_rejected(backends: list[Recording], tmp_path: Path) -> None:
    letters, sink = tmp_path / "letters.jsonl", MemorySink(MemoryClient(), "docs")
    folder = write_checkpoint(tmp_path / "model", "bert")
    with Engine(folder, device="cpu", backend="torch", dtype="float32", max_batch_tokens=128) as engine:
        lose_after(backends[0], 3)
        with pytest.raises(DeviceLostError, match="unspecified launch failure"):
            ingest(RECORDS, engine=engine, sink=sink, dead_letters=letters, show_progress=False)
    assert not letters.exists() or letters.read_text() == ""
