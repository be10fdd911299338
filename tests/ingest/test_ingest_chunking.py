"""Long texts in chunks: what the model reads whole, with spans of the whole text."""

import sys
import unicodedata
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ingest.memory_sink import MemorySink
from tests.tiny import SENTENCES, Layout, Normalize, Pooling, write_checkpoint

from millpond import Engine
from millpond.errors import InvalidRequestError, MissingExtraError
from millpond.ingest import Chunker, Chunking, Record, chunking, ingest, point_id

pytest.importorskip("semantic_text_splitter")

PROSE = " ".join(SENTENCES)


def words(text):
    return len(text.split())


def check(record, pieces, count, limit):
    """Every piece is what its span says and fits, and no visible character is in none."""
    covered = 0
    for number, piece in enumerate(pieces):
        start, end = piece.metadata["chunk_start"], piece.metadata["chunk_end"]
        assert (piece.id, piece.chunk, piece.metadata["chunk"]) == (record.id, number, number)
        assert record.text[start:end] == piece.text
        assert not chunking.is_blank(piece.text)
        assert count(piece.text) <= limit
        assert chunking.is_blank(record.text[covered:start])
        covered = max(covered, end)
    assert chunking.is_blank(record.text[covered:])
    for former, later in pairwise(pieces):
        assert former.metadata["chunk_start"] < later.metadata["chunk_start"]
        assert former.metadata["chunk_end"] < later.metadata["chunk_end"]


def test_a_long_text_is_cut_at_sentences_with_the_metadata_of_its_record():
    record = Record("a", "One two three. Four five six. Seven eight nine ten.", {"page": 1})
    pieces = Chunker(words, max_tokens=7).split(record)
    assert [piece.text for piece in pieces] == ["One two three. Four five six.", "Seven eight nine ten."]
    assert [dict(piece.metadata) for piece in pieces] == [
        {"page": 1, "chunk": 0, "chunk_start": 0, "chunk_end": 29},
        {"page": 1, "chunk": 1, "chunk_start": 30, "chunk_end": 51},
    ]
    assert [point_id(piece.id, piece.chunk) for piece in pieces] == [point_id("a"), point_id("a", 1)]
    assert record.metadata == {"page": 1}


@pytest.mark.parametrize("text", ["", " \n", "three words here", " as it is ", "\u200b" * 500])
def test_a_text_that_fits_or_is_blank_stays_as_it_is(text):
    record = Record("a", text, {"chunk": "of its own"})
    assert Chunker(words, max_tokens=3).split(record) == [record]


def test_a_piece_is_not_cut_again():
    chunker = Chunker(words, max_tokens=5)
    pieces = chunker.split(Record("a", PROSE))
    smaller = Chunker(words, max_tokens=2)
    assert len(pieces) > 3
    assert all(smaller.split(piece) == [piece] for piece in pieces)
    stored = Record("a", pieces[0].text, pieces[0].metadata)  # as a dead letter has it
    assert smaller.split(stored) == [stored]
    assert len(smaller.split(Record("a", PROSE, {"chunk": 0, "chunk_start": 0, "chunk_end": 5}))) > 3


def test_an_overlap_begins_with_no_accent_and_no_part_of_an_emoji():
    record = Record("a", "ที่นี่น้ำใส 👩\u200d👧👍\U0001f3fd" * 20)
    pieces = Chunker(len, max_tokens=20, overlap=7).split(record)
    assert len(pieces) > 10
    assert not [piece.text for piece in pieces if unicodedata.category(piece.text[0]) == "Mn"]
    assert not [piece.text for piece in pieces[1:] if piece.text[0] in "\u200d\U0001f3fd"]


def test_an_overlap_repeats_whole_words():
    record = Record("a", PROSE)
    alone = Chunker(words, max_tokens=20).split(record)
    pieces = Chunker(words, max_tokens=20, overlap=8).split(record)
    check(record, alone, words, 20)
    check(record, pieces, words, 20)
    assert all(former.metadata["chunk_end"] <= later.metadata["chunk_start"] for former, later in pairwise(alone))
    for former, later in pairwise(pieces):
        repeated = PROSE[later.metadata["chunk_start"] : former.metadata["chunk_end"]]
        assert 6 <= words(repeated) <= 8 and PROSE[later.metadata["chunk_start"] - 1] == " "


def test_markdown_is_cut_at_its_headings():
    text = "# One\n\na b c d\n\n# Two\n\ne f g"
    plain, markdown = (Chunker(words, max_tokens=9).split(Record(name, text)) for name in ("x.txt", "docs/x.MD"))
    assert [piece.text for piece in markdown] == ["# One\n\na b c d", "# Two\n\ne f g"]
    assert [piece.text for piece in plain] != [piece.text for piece in markdown]


@pytest.mark.parametrize("window", [1, 7])
def test_a_text_split_in_windows_is_covered(monkeypatch, window):
    monkeypatch.setattr(chunking, "_WINDOW_PER_TOKEN", window)
    for text in (PROSE * 3, "word " * 500, "x" * 300 + " " + "y z " * 100):
        record = Record("a", text)
        for overlap in (0, 5):
            check(record, Chunker(words, max_tokens=12, overlap=overlap).split(record), words, 12)


@settings(deadline=None)
@given(
    st.text(st.sampled_from("ab é漢😀\u200d\u0301.,\n\r\t\u00a0#*`|->"), max_size=400),
    st.integers(3, 20),
    st.booleans(),
)
def test_any_text_is_covered_by_pieces_that_fit(text, limit, markdown):
    """Counted in characters of UTF-8, as a tokenizer of bytes counts."""

    def count(part):
        return len(part.encode())

    record = Record("a.md" if markdown else "a", text)
    pieces = Chunker(count, max_tokens=limit + 4, overlap=limit // 3).split(record)
    if pieces != [record]:
        check(record, pieces, count, limit + 4)


def test_a_character_that_is_too_many_tokens_is_named():
    chunker = Chunker(lambda text: 1 + 9 * text.count("ﷺ"), max_tokens=5)
    with pytest.raises(InvalidRequestError, match="at character 4 has more than max_tokens=5 tokens in one word of 1"):
        chunker.split(Record("a", "abc ﷺ def"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0 must be an int from 1"),
        ({"max_tokens": 2.5}, "max_tokens=2.5 must be"),
        ({"overlap": -1}, "overlap=-1 must be"),
        ({"overlap": 0.6}, "more than half"),
        ({"overlap": float("nan")}, "overlap=nan must be"),
        ({"overlap": "10%"}, "overlap='10%' must be"),
        ({"max_tokens": 10, "overlap": 6}, "overlap=6 is more than half of max_tokens=10; choose at most 5"),
    ],
    ids=range(7),
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(InvalidRequestError, match=message):
        Chunking(**options)


def test_the_splitter_is_named_if_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "semantic_text_splitter", None)  # an import of it fails
    with pytest.raises(MissingExtraError, match=r"pip install 'millpond\[chunking\]'"):
        Chunker(words, max_tokens=5)


def test_the_settings_name_all_that_decides_where_a_text_is_cut():
    names = {Chunker(words, max_tokens=size, overlap=overlap).settings for size in (8, 9) for overlap in (0, 4)}
    assert len(names) == 4
    assert Chunker(words, max_tokens=8).settings == Chunker(words, max_tokens=8).settings


TEXTS = {
    "prose": PROSE * 4,
    "lines": PROSE.replace(". ", ".\n\n") * 3,
    "cjk": "池の水は静かに流れる。漢字仮名交じり文です" * 30,
    "emoji": "😀👩\u200d👩\u200d👧 é e\u0301 " * 60,
    "one word": "abcdefghij" * 300,
    "marks": "!?;: " * 200,
    "turkish": "İstanbul ve İzmir " * 60,
}


def write_prompted(folder, family):
    layout = Layout(modules=(Pooling(), Normalize()), prompts={"query": "find: ", "document": "keep this: "})
    return write_checkpoint(folder, family, sentence_transformers=layout, lowercase=family == "bert")


@pytest.fixture(params=["bert", "xlm-roberta", "qwen3"])
def tiny(request, engine_of, checkpoint_of):
    return engine_of(checkpoint_of(write_prompted, request.param))


@pytest.mark.parametrize("name", TEXTS)
def test_pieces_are_read_whole_by_every_kind_of_tokenizer(tiny, name):
    chunker = Chunker.for_engine(tiny, Chunking())
    record = Record("a", TEXTS[name])
    pieces = chunker.split(record)
    texts = [piece.text for piece in pieces]
    counts = tiny.count_tokens(texts, role="document")
    assert max(counts) <= tiny.spec.max_length
    assert not tiny.embed(texts, role="document").truncated.any()
    if len(pieces) > 1:
        check(record, pieces, lambda text: tiny.count_tokens([text], role="document")[0], tiny.spec.max_length)
        # They are filled: two neighbours would rarely fit together.
        assert sum(counts) / len(counts) > tiny.spec.max_length / 2


def test_more_tokens_than_the_model_reads_are_refused(tiny):
    (added,) = tiny.count_tokens([""], role="document")
    room = tiny.spec.max_length - added
    assert Chunker.for_engine(tiny, Chunking(max_tokens=room)).max_tokens == room
    with pytest.raises(InvalidRequestError, match=f"max_tokens={room + 1} is more than .* choose at most {room}"):
        Chunker.for_engine(tiny, Chunking(max_tokens=room + 1))
    with pytest.raises(InvalidRequestError, match=f"overlap={room} is more than half of max_tokens={room}"):
        Chunker.for_engine(tiny, Chunking(overlap=room))
    assert Chunker.for_engine(tiny, Chunking(overlap=0.5)).overlap == room // 2


def test_a_prompt_that_leaves_no_room_is_refused(tmp_path):
    layout = Layout(modules=(Pooling(),), prompts={"document": PROSE})
    with (
        Engine(write_checkpoint(tmp_path, "bert", sentence_transformers=layout), device="cpu") as engine,
        pytest.raises(InvalidRequestError, match="which leaves none for a chunk; raise max_length"),
    ):
        Chunker.for_engine(engine, Chunking())


def test_a_run_writes_every_piece_and_cuts_none(tiny):
    sink = MemorySink("", "docs")
    records = [Record(name, text) for name, text in TEXTS.items()] + [Record("short", "a few words"), Record("no", " ")]
    cut = Chunking(overlap=0.2)
    report = ingest(records, engine=tiny, sink=sink, chunking=cut, show_progress=False)
    chunker = Chunker.for_engine(tiny, cut)
    pieces = [piece for record in records[:-1] for piece in chunker.split(record)]
    assert (report.truncated, report.failed, report.blank) == (0, 0, 1)
    assert set(sink._driver.rows) == {point_id(piece.id, piece.chunk) for piece in pieces}
    assert len(sink._driver.rows) == len(pieces) > 3 * len(TEXTS)
