"""What every sink does, over a folder of Chroma."""

from pathlib import Path
from typing import Any

import pytest

from millpond.testing import CollectionSinkContract
from millpond_chroma import ChromaSink

pytestmark = pytest.mark.door


class TestChromaSink(CollectionSinkContract):
    lasting = True
    layouts = ("plain",)

    def make(self, folder: Path, **options: Any) -> ChromaSink:
        return ChromaSink(folder / "chroma", options.pop("collection", "docs"), **options)
