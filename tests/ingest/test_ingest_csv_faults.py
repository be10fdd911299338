"""CSV rows that are no CSV: a stray quote costs its own row, and what cannot be told apart is counted."""

import gzip
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millpond.errors import InvalidRequestError
from millpond.ingest import Record, Rejected, read
from millpond.ingest.sources import csv_rows


def rows_of(path, data, **options):
    """Ids of the records, and (line, lines) of what was rejected."""
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    items = list(read(path, **options))
    records = [item.id for item in items if isinstance(item, Record)]
    faults = [(int(item.where.rpartition(":")[2]), item.lines) for item in items if isinstance(item, Rejected)]
    return records, faults


STRAY = {
    "before a legal quoted cell": ('1,a\n2,"b\n3,c\n4,"d"\n5,e\n6,f\n', "13456", [(3, 1)]),
    "never closed": ('1,a\n2,"b\n3,c\n4,d\n', "134", [(3, 1)]),
    "in the last row": ('1,a\n2,b\n3,"c', "12", [(4, 1)]),
    "twice": ('1,a\n2,"b\n3,c\n4,"d\n5,e\n', "135", [(3, 1), (5, 1)]),
    "in rows one after another": ('1,a\n2,"b\n3,"c\n4,"d\n5,e\n', "15", [(3, 1), (4, 1), (5, 1)]),
    "in the id": ('1,a\n"2,b\n3,c\n"4",d\n5,e\n', "1345", [(3, 1)]),
    "before a cell over two lines": ('1,a\n2,"b\n3,"c, ""x""\nrest"\n4,d\n', "134", [(3, 1)]),
    "before a quoted empty cell": ('1,a\n2,"b\n3,c\n"4",""\n5,e\n', "1345", [(3, 1)]),
    "before a row that is short": ('1,a\n2,"b\n3\n4,"d"\n', "14", [(3, 1), (4, 1)]),
    "closed too early": ('1,a\n2,"b"c\n3,c\n', "13", [(3, 1)]),
    "closed too early, before rows that are short": ('1,a\n2,"b"c\n3\n4\n5,e\n', "15", [(3, 1), (4, 1), (5, 1)]),
    "closed too early, before two lines": ('1,a\n2,"b"c\n3,"x\ny"\n4,d\n', "134", [(3, 1)]),
}


@pytest.mark.parametrize("name", STRAY)
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"], ids=["lf", "crlf", "cr"])
@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gz"])
def test_a_stray_quote_costs_its_own_row(tmp_path, name, line_end, compressed):
    rows, records, faults = STRAY[name]
    data = ("id,text\n" + rows).replace("\n", line_end).encode()
    path = tmp_path / ("x.csv.gz" if compressed else "x.csv")
    assert rows_of(path, gzip.compress(data) if compressed else data) == (list(records), faults)


WHOLE = {
    "quotes inside a cell": ('1,a\n2,"He said "hi" to\nprose, one\nend, fine"\n3,c\n', "13", [(3, 3)]),
    "a quoted word before a delimiter": ('1,a\n2,"He said "hi", to\nprose, one\nend, fine"\n3,c\n', "13", [(3, 3)]),
    "a file that ends inside a cell": ('1,a\n2,"prose\nmore, of it\nand more\nand more\n', "1", [(3, 4)]),
    "a cell too many": ('1,a\n2,"one\ntwo, three",x\n3,c\n', "13", [(3, 2)]),
    "another cell over lines": ('1,a\n2,"say "hi"\nend","more\nlines"\n3,c\n', "13", [(3, 3)]),
}


@pytest.mark.parametrize("name", WHOLE)
def test_the_rest_of_a_broken_cell_makes_no_records(tmp_path, name):
    rows, records, faults = WHOLE[name]
    assert rows_of(tmp_path / "x.csv", "id,text\n" + rows) == (list(records), faults)


def test_legal_cells_over_lines_are_read(tmp_path):
    rows = '1,"a\nb, c\n\nd ""e"" f\n"\n2,"\n3,x\n4,y\n"\n3,say "x" and 5" of it\n'
    assert rows_of(tmp_path / "x.csv", "id,text\n" + rows) == (["1", "2", "3"], [])


def test_a_part_of_a_broken_row_is_no_record(tmp_path):
    rows = '1,"two\nlines"x,y\n2,c\n3,"d"\n'
    assert rows_of(tmp_path / "x.csv", "id,text\n" + rows) == (["2", "3"], [(2, 1), (3, 1)])


def test_a_fault_names_where_it_began_and_what_was_there(tmp_path):
    path = tmp_path / "x.csv"
    path.write_bytes(b'id,text,n\n1,a,1\n2,"He said "hi" to\nend\xe9, fine",2\n3,"b\nc",x\n4,d\n')
    items = list(read(path, types={"n": "int"}))
    assert [item.id for item in items if isinstance(item, Record)] == ["1"]
    broken, mistyped, short = (item for item in items if isinstance(item, Rejected))
    assert broken.where == f"{path}:3" and "it takes 2 lines" in broken.reason
    assert broken.content == '2,"He said "hi" to\nend\\xe9, fine",2' and broken.record_id is None
    assert mistyped == Rejected(where=f"{path}:5", reason=mistyped.reason, content='3,"b\nc",x', record_id="3", lines=2)
    assert "column 'n'" in mistyped.reason
    assert (short.where, short.content, short.lines) == (f"{path}:7", "4,d", 1)


def test_a_quote_that_is_never_closed_is_noticed_before_the_end_of_a_long_file(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_rows, "_ROW_CHARS", 1000)
    monkeypatch.setattr(csv_rows, "_AHEAD_LINES", 10)
    lines = ['x,"b\n', *(f"{number},text of {number}\n" for number in range(500))]
    records, faults = rows_of(tmp_path / "x.csv", "id,text\n" + "".join(lines))
    assert (len(records), faults) == (500, [(2, 1)])
    unread = iter(lines)
    cells, fault = next(iter(csv_rows.CsvRows(unread, delimiter=",", width=2)))
    assert cells == [] and "longer than 1000 characters, or never closed" in fault
    assert len(list(unread)) > 400


def test_a_broken_row_is_looked_at_within_bounds(tmp_path, monkeypatch):
    """Behind a broken row at most so many lines are held; later ones are rows of their own again."""
    monkeypatch.setattr(csv_rows, "_AHEAD_LINES", 10)
    records, faults = rows_of(tmp_path / "x.csv", 'id,text\nx,"b\n' + "prose\n" * 15 + "1,a\n")
    assert records == ["1"]
    assert faults == [(2, 11), *((line, 1) for line in range(13, 18))]


cell = st.text("ab é\n,", min_size=1, max_size=6).map(lambda inner: f"x{inner}x") | st.just('say ""x""!')
row = st.tuples(cell, st.booleans())


@settings(deadline=None)
@given(st.lists(row, min_size=1, max_size=8), st.lists(row, max_size=8), st.sampled_from(["\n", "\r\n"]))
def test_the_rows_around_a_stray_quote_are_read(tmp_path_factory, before, after, line_end):
    def line(name, content, quoted):
        plain = not quoted and not set(content) & set('\n,"')
        return f"{name},{content if plain else chr(34) + content + chr(34)}\n"

    rows = [line(f"b{i}", *one) for i, one in enumerate(before)]
    rows.append('stray,"text\n')
    rows += [line(f"a{i}", *one) for i, one in enumerate(after)]
    path = tmp_path_factory.getbasetemp() / "fuzz.csv"
    records, faults = rows_of(path, ("id,text\n" + "".join(rows)).replace("\n", line_end))
    assert records == [f"b{i}" for i in range(len(before))] + [f"a{i}" for i in range(len(after))]
    assert [lines for _, lines in faults] == [1]


def test_tabs_separate_the_cells_of_a_tsv(tmp_path):
    path = tmp_path / "x.tsv"
    path.write_text('id\ttext\tn\na\tone, two\t1\nb\t"three\nlines"\t2\nc\t"stray\t3\nd\tfour\t4\n')
    items = list(read(path, types={"n": "int"}))
    assert items[:2] == [Record("a", "one, two", {"n": 1}), Record("b", "three\nlines", {"n": 2})]
    assert (items[2].where, items[3]) == (f"{path}:5", Record("d", "four", {"n": 4}))
    (tmp_path / "x.tsv.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert len(list(read(tmp_path / "x.tsv.gz"))) == 4


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_columns_of_metadata_are_chosen_and_checked(tmp_path, suffix):
    path = tmp_path / f"x.{suffix}"
    path.write_text("id,text,a,b,c\n1,t,A,2,C\n".replace(",", "," if suffix == "csv" else "\t"))
    assert list(read(path, metadata_columns=["b", "a"], types={"b": "int"})) == [Record("1", "t", {"a": "A", "b": 2})]
    assert list(read(path, metadata_columns=[])) == [Record("1", "t")]
    with pytest.raises(InvalidRequestError, match="no column 'x', 'y' for metadata; its columns: 'id', 'text', 'a'"):
        read(path, metadata_columns=["a", "x", "y"])
    with pytest.raises(InvalidRequestError, match="types=c=int: the column is not one of metadata_columns"):
        read(path, metadata_columns=["a"], types={"c": "int"})
    with pytest.raises(InvalidRequestError, match="metadata_columns names 'text', which is the id or the text"):
        read(path, metadata_columns=["text"])
    with pytest.raises(TypeError, match="metadata_columns='a,b' is a str"):
        read(path, metadata_columns="a,b")
    with pytest.raises(TypeError, match="metadata_columns holds 5"):
        read(path, metadata_columns=[5])


def test_columns_of_metadata_are_chosen_from_json(tmp_path):
    path = tmp_path / "x.jsonl"
    rows = [{"text": "t", "a": 1, "b": 2, "metadata": {"c": 3, "d": 4}}, {"text": "u"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert [record.metadata for record in read(path, metadata_columns=["a", "d", "other"])] == [{"a": 1, "d": 4}, {}]
    assert [record.metadata for record in read(path, metadata_columns=["metadata"])] == [{"c": 3, "d": 4}, {}]
    (tmp_path / "texts").mkdir()
    with pytest.raises(InvalidRequestError, match="metadata_columns=a: the texts of the folder"):
        read(tmp_path / "texts", metadata_columns=["a"])
