"""What every sink does, over a file of Milvus Lite."""

from pathlib import Path
from typing import Any

import pytest

from millpond.testing import CollectionSinkContract
from millpond_milvus import MilvusSink

pytest.importorskip("milvus_lite")
pytestmark = pytest.mark.contract


class TestMilvusLite(CollectionSinkContract):
    lasting = True

    def make(self, folder: Path, **options: Any) -> MilvusSink:
        return MilvusSink(folder / "x.db", options.pop("collection", "docs"), **options)
