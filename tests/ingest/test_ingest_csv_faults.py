"""CSV rows that are not CSV: a stray quote costs its first line, and reading goes on with the next."""

import gzip

import pytest

from millpond.ingest import Record, Rejected, read


def rows_of(path, data, **options):
    """Ids of the records, and (line, lines) of what was rejected."""
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    items = list(read(path, **options))
    records = [item.id for item in items if isinstance(item, Record)]
    faults = [(int(item.where.rpartition(":")[2]), item.lines) for item in items if isinstance(item, Rejected)]
    return records, faults


STRAY = {
    "before a legal quoted cell": ('1,a\n2,"b\n3,c\n4,"d"\n5,e\n6,f\n', "13456", [3]),
    "never closed": ('1,a\n2,"b\n3,c\n4,d\n', "134", [3]),
    "in rows one after another": ('1,a\n2,"b\n3,"c\n4,"d\n5,e\n', "15", [3, 4, 5]),
    "before a cell over two lines": ('1,a\n2,"b\n3,"c, ""x""\nrest"\n4,d\n', "134", [3]),
    "before a row that is short": ('1,a\n2,"b\n3\n4,"d"\n', "14", [3, 4]),
    "closed too early": ('1,a\n2,"b"c\n3,c\n', "13", [3]),
    "inside a cell, whose rest has a quote": ('1,a\n2,"say "hi" to\nthem, and leave"\n3,c\n', "13", [3, 4]),
    "inside a cell, whose rest is short": ('1,a\n2,"say "hi" to\nthem\nall"\n3,c\n', "13", [3, 4, 5]),
}


@pytest.mark.parametrize("name", STRAY)
def test_a_stray_quote_costs_its_own_line(tmp_path, name):
    rows, records, lines = STRAY[name]
    assert rows_of(tmp_path / "x.csv", "id,text\n" + rows) == (list(records), [(line, 1) for line in lines])


@pytest.mark.parametrize("line_end", ["\r\n", "\r"], ids=["crlf", "cr"])
def test_a_stray_quote_is_found_at_other_line_ends_and_in_a_compressed_tsv(tmp_path, line_end):
    data = 'id\ttext\n1\ta\n2\t"b\n3\t"c\n4"\n5\te\n'.replace("\n", line_end).encode()
    assert rows_of(tmp_path / "x.tsv.gz", gzip.compress(data)) == (["1", "3", "5"], [(3, 1)])


def test_legal_cells_over_lines_are_read(tmp_path):
    rows = '1,"a\nb, c\n\nd ""e"" f\n"\n2,"\n3,x\n4,y\n"\n3,say "x" and 5" of it\n'
    assert rows_of(tmp_path / "x.csv", "id,text\n" + rows) == (["1", "2", "3"], [])


def test_a_fault_names_where_it_began_and_what_was_there(tmp_path):
    path = tmp_path / "x.csv"
    path.write_bytes(b'id,text,n\n1,a,1\n2,"caf\xe9\n3,"b\nc",x\n4,d\n')
    items = list(read(path, types={"n": "int"}))
    assert [item.id for item in items if isinstance(item, Record)] == ["1"]
    broken, mistyped, short = (item for item in items if isinstance(item, Rejected))
    assert broken.where == f"{path}:3" and broken.content == '2,"caf\\xe9' and broken.record_id is None
    assert "not CSV" in broken.reason and "in line 4); reading goes on with the next line" in broken.reason
    assert mistyped == Rejected(where=f"{path}:4", reason=mistyped.reason, content='3,"b\nc",x', record_id="3", lines=2)
    assert "column 'n'" in mistyped.reason
    assert (short.where, short.content, short.lines) == (f"{path}:6", "4,d", 1)


@pytest.mark.contract
def test_a_quote_that_is_never_closed_is_noticed_before_the_end_of_a_long_file(tmp_path):
    """After 33 million characters: the rows behind it are read, and the memory is bounded by as many."""
    row = "x" * 1_000_000
    data = 'id,text\nx,"b\n' + "".join(f"{number},{row}\n" for number in range(40)) + '99,"end"\n'
    records, faults = rows_of(tmp_path / "x.csv", data)
    assert (len(records), faults) == (41, [(2, 1)])
