"""What every sink does, over a folder of LanceDB."""

from pathlib import Path
from typing import Any

from millpond.testing import CollectionSinkContract
from millpond_lancedb import LanceDBSink


class TestLanceDBSink(CollectionSinkContract):
    lasting = True
    layouts = ("plain",)

    def make(self, folder: Path, **options: Any) -> LanceDBSink:
        return LanceDBSink(folder / "lance", options.pop("collection", "docs"), **options)
