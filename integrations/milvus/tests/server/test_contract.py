"""What every sink does, over a real Milvus 2.3.5, whose collections have one vector field."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from integrations.milvus.tests.server.running import RunningMilvus

from millpond import InvalidRequestError
from millpond.testing import CollectionSinkContract, WordEngine
from millpond_milvus import MilvusSink

pytestmark = pytest.mark.service


class TestMilvusServer(CollectionSinkContract):
    lasting = True
    widths: ClassVar[tuple[int, ...]] = (384,)
    url: str

    @pytest.fixture(autouse=True)
    def database(self, server: RunningMilvus, tmp_path: Path) -> Iterator[None]:
        """Each test has a database of its own."""
        with server.database(tmp_path.name) as self.url:
            yield

    def make(self, folder: Path, **options: Any) -> MilvusSink:
        return MilvusSink(self.url, options.pop("collection", "docs"), **options)

    def test_the_smallest_width_finds_candidates_and_the_largest_scores_them(
        self, tmp_path: Path, engine: WordEngine
    ) -> None:
        with (
            self.make(tmp_path, dimensions=[16, 64, 384]) as sink,
            pytest.raises(InvalidRequestError, match=r"version 2.3.5, and dimensions=\[16, 64, 384\] needs 2.4"),
        ):
            sink.prepare(engine.spec)
        assert sink.client.list_collections() == []

    def test_other_widths_layouts_and_models_are_refused(self, tmp_path: Path, engine: WordEngine) -> None:
        with self.make(tmp_path, dimensions=[384]) as sink:
            sink.prepare(engine.spec)
        for options, message in (
            ({"dimensions": [64]}, r"pass dimensions=\[384\]"),
            ({"dimensions": [384], "fields": "langchain"}, "pass fields='plain'"),
        ):
            with self.make(tmp_path, **options) as other, pytest.raises(InvalidRequestError, match=message):
                other.prepare(engine.spec)
