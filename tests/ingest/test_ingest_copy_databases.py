"""Copies between real databases: rows, vectors and hits are the same, and each row is traced to where it came from."""

from __future__ import annotations

import json
import os
import signal
from contextlib import ExitStack, closing

import numpy as np
import pytest
from tests.cli.conftest import Run, run
from tests.ingest.copied import NAMES, address, content, fill, same

from millpond.errors import InvalidRequestError
from millpond.ingest import Record, WriteBatch, copy, open_sink, point_id, trace
from millpond.ingest.copying import copy_run
from millpond.testing import WordEngine
from millpond.testing.collection import QUESTIONS
from millpond.testing.sink import ODD, records, vectors
from millpond.testing.sink import fill as write

pytestmark = pytest.mark.contract
__all__ = ["run"]

WIDTHS = (64, 384)
# Every database is a source and a target; the last one is compared with the first.
CIRCLE = ["qdrant", "milvus", "lancedb", "qdrant"]


@pytest.fixture(scope="module")
def words():
    return WordEngine()


@pytest.fixture
def kept():
    """Closes what it is called with at the end of the test, and returns it."""
    with ExitStack() as stack:
        yield lambda sink: stack.enter_context(closing(sink))


@pytest.mark.parametrize("between", [None, *(name for name in NAMES if name not in CIRCLE)])
def test_after_a_round_trip_rows_and_hits_are_the_same(request, tmp_path, words, between):
    names = CIRCLE if between is None else ["qdrant", between, "qdrant"]
    if between is not None:
        address(request, between, tmp_path)
    own = [*records(), *(each for each in ODD if each.id != "long" or "milvus" not in names)]
    sinks = []
    for number, name in enumerate(names):
        (folder := tmp_path / str(number)).mkdir()
        sink = open_sink(address(request, name, folder), dimensions=list(WIDTHS) if number == 0 else None)
        if not sinks:
            write(sink, words, own, WIDTHS)
        else:
            report = copy(sinks[-1], sink, show_progress=False)
            assert report.good and report.written == report.verification.rows == len(own)
            again = copy(sinks[-1], sink, show_progress=False)
            assert again.good and (again.written, again.unchanged) == (0, len(own))
        sinks.append(sink)
    same(sinks[0], sinks[-1])
    assert content(sinks[0])[0] == {
        point_id(each.id): (each.id, each.text, each.metadata, content(sinks[0])[0][point_id(each.id)][3])
        for each in own
    }
    for sink in sinks[1:]:
        for question in QUESTIONS:
            hits, wanted = (each.search(words, question, k=8, candidates=60) for each in (sink, sinks[0]))
            assert [(hit.id, hit.text, hit.metadata) for hit in hits] == [
                (hit.id, hit.text, hit.metadata) for hit in wanted
            ]
            assert [hit.score for hit in hits] == pytest.approx([hit.score for hit in wanted], abs=1e-5)
    for sink in sinks:
        sink.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_row_is_traced_in_every_database(request, tmp_path, words, name):
    sink = open_sink(address(request, name, tmp_path), dimensions=list(WIDTHS))
    sink.prepare(words.spec, chunked=True)
    pieces = [
        Record("long", f"piece {n}", {"chunk": n, "chunk_start": 9 * n, "chunk_end": 9 * n + 7}, n) for n in range(3)
    ]
    rows = [*pieces, Record("whole", "one text", {"page": 7})]
    texts = [each.text for each in rows]
    batch = WriteBatch(
        records=rows,
        ids=[point_id(each.id, each.chunk) for each in rows],
        vectors={width: vectors(words, texts, width) for width in WIDTHS},
    )
    sink.write(batch)
    sink.note_run("one")
    found = trace(sink, "long")
    assert [(each.record_id, each.chunk, each.span, each.text) for each in found] == [
        ("long", n, (9 * n, 9 * n + 7), f"piece {n}") for n in range(3)
    ]
    assert [each.row_id for each in found] == batch.ids[:3]
    for each in found:
        assert each.hash_fits and each.norms == {width: pytest.approx(1, abs=1e-5) for width in WIDTHS}
    (piece,) = trace(sink, batch.ids[1])
    assert piece == found[1]
    (whole,) = trace(sink, "whole")
    assert (whole.chunk, whole.span, dict(whole.metadata), whole.by_framework) == (None, None, {"page": 7}, False)
    for unknown in ("nobody", point_id("nobody"), "17", "a/b#c"):
        assert trace(sink, unknown) == []
    sink.close()


@pytest.mark.parametrize("name", NAMES)
def test_the_runs_are_kept_in_every_database(request, tmp_path, words, name):
    url = address(request, name, tmp_path)
    source = fill(f"qdrant+path:{tmp_path}/source#docs", 5, spec=words.spec)
    source.note_run("one")
    for number in (1, 2):
        target = open_sink(url)
        copy(source, target, show_progress=False, sync=True)
        target.delete_rows([point_id("r1")])
        target.close()
        target = open_sink(url)
        (note,) = target.open().runs
        assert (note.command, note.source, note.runs) == ("copy", source.target, number)
        assert target.last_run() == note.run
        target.close()
    source.close()


@pytest.mark.parametrize("layout", ["langchain", "llama_index"])
@pytest.mark.parametrize("name", ["qdrant", "milvus"])
def test_layouts_are_kept_and_changed(request, tmp_path, words, name, layout):
    source = open_sink(address(request, name, tmp_path), dimensions=[384], fields=layout)
    write(source, words, records(12), [384])
    for other in ("qdrant", "milvus"):
        (folder := tmp_path / other).mkdir()
        for fields in (None, "plain"):
            url = address(request, other, folder).replace("#docs", f"#docs_{fields}")
            target = open_sink(url, fields=fields)
            assert copy(source, target, show_progress=False).good
            assert target.manifest.fields == (fields or layout)
            assert content(target, [384])[0] == content(source, [384])[0]
            target.close()
    bytes_ = open_sink(f"qdrant+path:{tmp_path}/bytes#docs", datatype="uint8")
    with pytest.raises(InvalidRequestError, match=f"datatype='uint8' with fields='{layout}'"):
        copy(source, bytes_, show_progress=False)
    assert not bytes_.collections()
    bytes_.close()
    (folder := tmp_path / "lance").mkdir()
    target = open_sink(address(request, "lancedb", folder))
    with pytest.raises(InvalidRequestError, match="LanceDB stores plain; pass fields='plain'"):
        copy(source, target, show_progress=False)
    source.close()


OWN = ["5f0c2f4e-33a8-4a1c-9d43-0e5a3ed0a0aa", "17"]


def their_payload(row_id, layout):
    """What a framework writes; LlamaIndex's two nodes are of one document."""
    text, metadata = f"their {row_id}", {"n": 1}
    if layout == "langchain":
        return {"page_content": text, "metadata": metadata}
    node = {"id_": row_id, "metadata": metadata, "text": text, "class_name": "TextNode", "relationships": {}}
    ids = dict.fromkeys(("document_id", "doc_id", "ref_doc_id"), "their document")
    return {**metadata, "_node_content": json.dumps(node), "_node_type": "TextNode", **ids}


@pytest.fixture(params=["langchain", "llama_index"])
def theirs(request, tmp_path, words):
    """A collection of Qdrant in a framework's layout, with points that the framework wrote under ids of its own."""
    models = pytest.importorskip("qdrant_client").models
    sink = open_sink(f"qdrant+path:{tmp_path}/theirs#docs", dimensions=[384], fields=request.param)
    write(sink, words, records(3), [384])
    points = [
        models.PointStruct(
            id=int(each) if each.isdigit() else each,
            vector={"d384": vectors(words, [f"their {each}"], 384)[0].tolist()},
            payload=their_payload(each, request.param),
        )
        for each in OWN
    ]
    sink.client.upsert("docs", points)
    yield sink
    sink.close()


@pytest.mark.parametrize(
    ("name", "fields", "kept"),
    [
        ("qdrant", None, True), ("qdrant", "plain", True), ("milvus", None, True), ("milvus", "plain", False),
        ("lancedb", "plain", False), ("pgvector", "plain", False),
        *(("chroma", "plain", False) for name in NAMES if name == "chroma"),
    ],
)  # fmt: skip
def test_rows_of_a_framework_stay_findable(request, tmp_path, words, theirs, name, fields, kept):
    target = open_sink(address(request, name, tmp_path), fields=fields)
    assert copy(theirs, target, show_progress=False).good
    ids = {row_id for row_id, _ in target.scan()}
    own = set(OWN) if kept else {point_id(each) for each in OWN}
    assert ids == {point_id(each.id) for each in records(3)} | own
    assert copy(theirs, target, show_progress=False, sync=True).unchanged == 5
    for each in OWN:
        (hit,) = target.search(words, f"their {each}", k=1)
        assert (hit.id, hit.text, hit.metadata) == (each, f"their {each}", {"n": 1})
        (origin,) = trace(target, each)
        assert origin.by_framework is kept and origin.text == f"their {each}"
    target.delete(OWN)
    assert target.count() == 3
    target.close()


class SparseWords(WordEngine):
    """Has sparse vectors, too."""

    def __init__(self):
        from dataclasses import replace

        super().__init__()
        self.spec = replace(self.spec, tasks=frozenset({"embed", "sparse_embed"}))


@pytest.mark.parametrize(("name", "other"), [("qdrant", "milvus"), ("milvus", "qdrant"), ("qdrant", "qdrant")])
def test_sparse_vectors_are_copied_where_both_have_such(request, tmp_path, name, other):
    words = SparseWords()
    (tmp_path / "t").mkdir()
    source = open_sink(address(request, name, tmp_path), dimensions=[384], hybrid=True)
    source.prepare(words.spec)
    rows = records(9)
    sparse = [{7: 0.5, 2000 + n: 1.25} if n else {} for n in range(9)]
    texts = [each.text for each in rows]
    source.write(
        WriteBatch(
            records=rows,
            ids=[point_id(each.id) for each in rows],
            vectors={384: vectors(words, texts, 384)},
            sparse=sparse,
        )
    )
    target_url = address(request, other, tmp_path / "t")
    target = open_sink(target_url, hybrid=True)
    assert copy(source, target, show_progress=False).good
    stored = target.read_rows([point_id(each.id) for each in rows], widths=[384])
    assert [dict(stored[point_id(each.id)].sparse) for each in rows] == sparse
    assert target.manifest.sparse == source.manifest.sparse
    target.close()
    target = open_sink(target_url.replace("#docs", "#dense"))
    with pytest.raises(InvalidRequestError, match="open it with hybrid=True, or pass dense_only=True"):
        copy(source, target, show_progress=False)
    assert copy(source, target, dense_only=True, show_progress=False).good and target.manifest.sparse is None
    with pytest.raises(InvalidRequestError, match="no sparse vectors are copied"):
        copy(target, source, show_progress=False)
    for sink in (source, target):
        sink.close()


def test_signs_are_no_vectors_and_float16_is_copied_as_it_is(request, tmp_path, words, kept):
    url = address(request, "pgvector", tmp_path)
    signs = kept(fill(url.replace("#docs", "#signs"), 20, spec=words.spec, datatype="bit"))
    target = kept(open_sink(f"lancedb+path:{tmp_path}/l#docs"))
    with pytest.raises(InvalidRequestError, match=r"widths \[64\] .*copy the others by dimensions=384"):
        copy(signs, target, show_progress=False)
    assert not (tmp_path / "l").exists() or not target.collections()
    narrow = kept(open_sink(f"lancedb+path:{tmp_path}/l#narrow", dimensions=[384]))
    assert copy(signs, narrow, show_progress=False).good
    half = kept(fill(url.replace("#docs", "#half"), 20, spec=words.spec, datatype="float16"))
    back = kept(open_sink(url.replace("#docs", "#back"), datatype="float16"))
    assert copy(half, kept(open_sink(f"qdrant+path:{tmp_path}/q#docs")), show_progress=False).good
    assert copy(half, back, show_progress=False).good
    same(half, back, atol=0)
    bits = kept(open_sink(url.replace("#docs", "#bits"), datatype="bit"))
    again = copy(half, bits, show_progress=False)
    assert again.good and copy(half, bits, show_progress=False).unchanged == 20


def test_the_commands_copy_and_trace(run: Run, request, tmp_path, words):
    source = f"qdrant+path:{tmp_path}/q#docs"
    fill(source, 30, spec=words.spec).close()
    target = f"lancedb+path:{tmp_path}/l#docs"
    done = run("copy", source, target, "--dimensions", "384", "--format", "json", code=0)
    (report,) = done.rows
    assert (report["read"], report["written"], report["verification"]["rows"]) == (30, 30, 30)
    table = run("copy", source, target, "--rows-per-second", "100000", code=0).out
    assert "unchanged      30\n" in table and "compared" in table
    with_more = open_sink(target)
    write(with_more, words, [Record("more", "more")], [384])
    with_more.close()
    assert "deleted        1\n" in run("copy", source, target, "--sync", code=0).out
    found = json.loads(run("trace", target, "r3", "--format", "json", code=0).out)
    (row,) = found["rows"]
    assert (row["row"], row["record"], row["hash_fits"]) == (point_id("r3"), "r3", True)
    assert found["runs"][-1]["command"] == "copy" and found["model"] == "words"
    shown = run("trace", target, point_id("r3"), code=0).out
    assert "record        r3\n" in shown and "copy of Qdrant " in shown and "384 (length 1)" in shown
    err = run("trace", target, "nobody", code=2).err
    assert err == "millpond: collection 'docs' has no record and no row of the id 'nobody'\n"


def test_the_command_makes_nothing_where_it_refuses(run: Run, request, tmp_path, words):
    models = pytest.importorskip("qdrant_client").models
    foreign = open_sink(f"qdrant+path:{tmp_path}/q#docs")
    params = models.VectorParams(size=4, distance=models.Distance.COSINE)
    foreign.client.create_collection("docs", vectors_config=params)
    foreign.close()
    target = f"lancedb+path:{tmp_path}/l#docs"
    err = run("copy", f"qdrant+path:{tmp_path}/q#docs", target, code=2).err
    assert "was not made by millpond" in err and "rows are not copied" in err and "millpond ingest" in err
    assert "rows are not traced" in run("trace", f"qdrant+path:{tmp_path}/q#docs", "a", code=2).err
    with pytest.importorskip("millpond_qdrant").QdrantIndex(tmp_path / "t", "tokens", words) as index:
        index.add(["a"], ["a mill"])
    err = run("copy", f"qdrant+path:{tmp_path}/t#tokens", target, code=2).err
    assert "holds token vectors for late interaction, which are not copied" in err
    assert "there is no database" in run("copy", f"qdrant+path:{tmp_path}/none#docs", target, code=2).err
    hybrid = open_sink(f"qdrant+path:{tmp_path}/h#docs", dimensions=[384], hybrid=True)
    hybrid.prepare(SparseWords().spec)
    hybrid.close()
    err = run("copy", f"qdrant+path:{tmp_path}/h#docs", target, code=2).err
    assert "--dense-only leaves them out" in err and not (tmp_path / "l").exists()
    run("copy", f"qdrant+path:{tmp_path}/h#docs", target, "--dense-only", code=0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_copy_and_the_same_command_goes_on(run: Run, tmp_path, words, monkeypatch, number, code):
    source, target = (f"lancedb+path:{tmp_path}/{name}#docs" for name in ("a", "b"))
    fill(source, 50, spec=words.spec).close()
    monkeypatch.setattr(copy_run, "_PAGE_ROWS", 20)
    copy_page = copy_run.CopyRun._copy_page

    def signalled(self, *given):
        copy_page(self, *given)
        os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(copy_run.CopyRun, "_copy_page", signalled)
        done = run("copy", source, target, "--format", "json", code=code)
    (report,) = done.rows
    assert report["stopped"] and report["read"] == 20 and report["verification"] is None
    assert done.err.endswith("millpond: stopped; run the same command again to go on\n")
    (report,) = run("copy", source, target, "--format", "json", code=0).rows
    assert (report["unchanged"], report["written"]) == (20, 30)


def test_a_row_that_the_target_cannot_store_is_exit_1(run: Run, request, tmp_path, words):
    source = f"lancedb+path:{tmp_path}/l#docs"
    sink = open_sink(source, dimensions=[384])
    write(sink, words, [*records(5), Record("long", "word " * 20_000)], [384])
    sink.close()
    done = run("copy", source, address(request, "milvus", tmp_path), "--dead-letters", tmp_path / "dead.jsonl", code=1)
    assert "1 row was left out" in done.err and "written        5\n" in done.out
    (letter,) = [json.loads(line) for line in (tmp_path / "dead.jsonl").read_text().splitlines()]
    assert letter["id"] == "long" and "65535" in letter["reason"]


def test_random_vectors_survive_exactly(request, tmp_path, words):
    source = fill(f"lancedb+path:{tmp_path}/l#docs", 300, spec=words.spec)
    target = open_sink(address(request, "milvus", tmp_path))
    copy(source, target, show_progress=False)
    for width, rows in content(source)[1].items():
        assert np.array_equal(rows, content(target)[1][width])
