"""What every sink does, over PostgreSQL."""

from pathlib import Path
from typing import Any

import pytest

from millpond.testing import CollectionSinkContract
from millpond_pgvector import PgVectorSink

pytestmark = pytest.mark.contract


class TestPgVectorSink(CollectionSinkContract):
    lasting = True
    layouts = ("plain",)

    @pytest.fixture(autouse=True)
    def schema(self, dsn: str) -> None:
        self.dsn = dsn

    def make(self, folder: Path, **options: Any) -> PgVectorSink:
        return PgVectorSink(self.dsn, options.pop("collection", "docs"), **options)
