"""MilvusIndex: the contract of every index, in Milvus Lite, and what only an index in Milvus has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millpond import Engine, FingerprintMismatchError, InvalidRequestError
from millpond.ingest import Record, SinkError, content_hash, ingest, point_id
from millpond.late_interaction import LateInteractionIndex
from millpond.late_interaction.codecs.rows import INT8
from millpond.late_interaction.encoding.muvera import Muvera
from millpond.testing import IndexContract
from millpond.testing.matrices import matrices, names, ragged
from millpond_milvus import MilvusIndex, MilvusSink
from millpond_milvus.rows import pack, packed_tokens

pytestmark = pytest.mark.contract


class TestLite(IndexContract):
    """In a file of Milvus Lite, with candidates by MUVERA."""

    atomic = False
    rounds = 5

    def open(self, path: Path, engine: Engine | None, **options: Any) -> LateInteractionIndex:
        return MilvusIndex(path.with_suffix(".db"), "docs", engine, **options)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path / "x.db")


def test_a_document_is_a_row_of_the_plain_fields(uri: str) -> None:
    with MilvusIndex(uri, "docs", None) as index:
        (matrix,) = matrices(1)
        index.add_embeddings(["a/1"], ragged([matrix]), texts=["one"], metadata=[{"n": 1}])
        (row,) = index.client.query("docs", filter="tokens >= 0", output_fields=["*", "muvera"])
        added, rows, encoding = row.pop("added"), row.pop("rows"), row.pop("muvera")
        assert row == {
            "pk": point_id("a/1"),
            "id": "a/1",
            "text": "one",
            "metadata": {"n": 1},
            "content_hash": content_hash("one"),
            "tokens": 6,
        }
        assert added > 0 and len(encoding) == 2560
        tokens = packed_tokens([rows], [6], width=32)
        assert len(rows) == 4 * -(-6 * 34 // 3)  # base64 of int8 and float16 scales
        assert np.abs(INT8.unpack(tokens.rows, tokens.scales, 32) - matrix).max() < 0.005
        described = index.client.describe_collection("docs")
        manifest = json.loads(described["properties"]["millpond"])
        assert (manifest["kind"], manifest["codec"], manifest["width"]) == ("late_interaction", "int8", 32)
        indexed = index.client.describe_index("docs", "muvera")
        assert (indexed["index_type"], indexed["metric_type"]) == ("FLAT", "IP")


@pytest.mark.parametrize("width", [1, 3, 17, 128])
def test_packed_rows_are_what_was_packed(width: int) -> None:
    values = [*matrices(4, width=width, tokens=[1, 0, 7, 300]), np.zeros((2, width), np.float32)]
    tokens = packed_tokens([pack(matrix) for matrix in values], [len(matrix) for matrix in values], width=width)
    assert tokens.offsets.tolist() == [0, 1, 1, 8, 308, 310]
    unpacked = INT8.unpack(tokens.rows, tokens.scales, width)
    assert np.abs(unpacked - np.concatenate(values)).max() <= 0.5 / 127 + 1e-3


@pytest.mark.parametrize("text", ["", "AAAA", "é", "A" * 272 + "AAAA"])
def test_packed_rows_of_another_size_are_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"are no 6 rows|ASCII"):
        packed_tokens([text], [6], width=32)


def test_other_options_than_the_collections_are_refused(uri: str) -> None:
    with MilvusIndex(uri, "docs", None) as index:
        index.add_embeddings(["a"], ragged(matrices(1)))
    with pytest.raises(InvalidRequestError, match="'docs' was made with prefetch='muvera'.*; pass prefetch='muvera'"):
        MilvusIndex(uri, "docs", None, prefetch="dense")
    for prefetch in ("bm25", None, "tokens"):
        with pytest.raises(InvalidRequestError, match=f"prefetch={prefetch!r} is unknown; choose one of muvera, dense"):
            MilvusIndex(uri, "docs", None, prefetch=prefetch)  # type: ignore[arg-type]


def test_a_collection_of_something_else_is_refused(uri: str, engine: Engine) -> None:
    with MilvusSink(uri, "sink") as sink:
        ingest([Record("a", "text")], engine=engine, sink=sink, show_progress=False)
        sink.client.create_collection("foreign", dimension=4)
    for name, message in (("sink", "as a sink writes them"), ("foreign", "was not made by millpond")):
        with pytest.raises(FingerprintMismatchError, match=f"'{name}' .*{message}"):
            MilvusIndex(uri, name, None)
    with MilvusIndex(uri, "docs", None) as index:
        index.add_embeddings(["a"], ragged(matrices(1)))
        with (
            pytest.raises(FingerprintMismatchError, match="'docs' carries a manifest"),
            MilvusSink(uri, "docs") as sink,
        ):
            sink.search(engine, "text")


def test_true_is_not_1_although_milvus_lite_takes_it_for_it(uri: str) -> None:
    values = matrices(60)
    metadata = [{"flag": (1, True, 0, False, 1.0, [True])[n % 6]} for n in range(60)]
    with MilvusIndex(uri, "docs", None) as index:
        index.add_embeddings(names(60), ragged(values), metadata=metadata)
        for wanted, kinds in ((True, [1, 5]), (1, [0, 4]), (False, [3]), (0, [2]), ([False, 1], [0, 3, 4])):
            hits = index.search_embeddings(ragged(values[:1]), k=60, candidates=60, filter={"flag": wanted})[0]
            assert {int(hit.id[4:]) % 6 for hit in hits} == set(kinds) and len(hits) == 10 * len(kinds)
            few = index.search_embeddings(ragged(values[:1]), k=1, candidates=1, filter={"flag": wanted})[0]
            assert len(few) == 1 and int(few[0].id[4:]) % 6 in kinds
        assert index.delete(filter={"flag": True}) == 20 and len(index) == 40


def test_candidates_are_those_of_the_prefetch(uri: str) -> None:
    values = matrices(40)
    with MilvusIndex(uri, "docs", None) as index:
        index.add_embeddings(names(40), ragged(values))
        encoding = Muvera(width=32)
        near = encoding.encode_queries(ragged(values[5:6])) @ encoding.encode_documents(ragged(values)).T
        best = {f"doc-{n}" for n in np.argsort(-near[0])[:7]}
        hits = index.search_embeddings(ragged(values[5:6]), k=7, candidates=7)[0]
        assert {hit.id for hit in hits} == best
        together = index.search_embeddings(ragged(values[5:9]), k=7, candidates=7)[0]
        assert together == hits  # and not from the candidates of the others


def test_many_rows_are_fetched_in_parts(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millpond_milvus.index._MAX_FETCHED", 20_000)
    values = matrices(50)
    with MilvusIndex(uri, "docs", None) as index:
        index.add_embeddings(names(50), ragged(values))
        fetched: list[int] = []
        query = index.client.query

        def queried(*arguments: Any, **options: Any) -> Any:
            rows = query(*arguments, **options)
            fetched.extend([len(rows)] * ("rows" in options["output_fields"]))
            return rows

        monkeypatch.setattr(index.client, "query", queried)
        hits = index.search_embeddings(ragged(values[:2]), k=50, exact=True)
        assert [len(each) for each in hits] == [50, 50] and len(fetched) > 2 and sum(fetched) == 50
        assert [each[0].id for each in hits] == ["doc-0", "doc-1"]


def test_a_document_that_no_request_can_carry_is_refused(uri: str) -> None:
    with MilvusIndex(uri, "docs", None) as index:
        with pytest.raises(
            InvalidRequestError, match=r"document 'b' takes 66\d+ bytes in a request, and Milvus at most"
        ):
            index.add_embeddings(["a", "b"], ragged(matrices(2)), texts=["", "x" * 66_060_000])
        assert len(index) == 0


def test_check_names_damaged_rows(uri: str) -> None:
    with MilvusIndex(uri, "docs", None) as index:
        index.add_embeddings(names(3), ragged(matrices(3, tokens=[2, 0, 4])))
        assert index.check() == []
        (row,) = index.client.query("docs", filter='id == "doc-2"', output_fields=["*", "muvera"])
        index.client.insert("docs", [{**row, "rows": "AAAA"}])
        index.client.insert("docs", [{**row, "pk": "other", "id": "doc-9"}])
        foreign, damaged = index.check()
        assert "the row 'other' was not written by an index (its id is 'doc-9')" in foreign
        assert "document 'doc-2': ValueError: 3 bytes are no 4 rows of 32 columns" in damaged
        with pytest.raises(SinkError, match="holds rows that cannot be read .*check.. names them"):
            index.search_embeddings(ragged(matrices(1)))
