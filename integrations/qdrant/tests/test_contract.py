"""What every sink does, over a folder of Qdrant; the core's tests have it over Qdrant in memory."""

from pathlib import Path
from typing import Any

import pytest

from millpond.testing import CollectionSinkContract
from millpond_qdrant import QdrantSink

pytestmark = pytest.mark.contract


class TestQdrantFolder(CollectionSinkContract):
    lasting = True

    def make(self, folder: Path, **options: Any) -> QdrantSink:
        return QdrantSink(folder / "qdrant", options.pop("collection", "docs"), **options)
