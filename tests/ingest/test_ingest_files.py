"""Files of a folder: sections, pages and functions as records, and what becomes of those that cannot be read."""

import importlib.util
import os

import pytest
from tests.ingest.crashes import CrashingSink, memory, run

from millpond.errors import MissingExtraError
from millpond.ingest import Chunker, Chunking, Record, Rejected, ingest, read
from millpond.ingest.sources.files import kinds
from millpond.ingest.sources.folder import reads_file, walk_folder

MARKDOWN = """before

# Mill

## Wheel
It turns.

## Wheel
It stands.

# Pond
```sh
# no heading
```

# Last
"""


def files(folder, **contents):
    for name, content in contents.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def parts(folder):
    return {item.id if isinstance(item, Record) else item.record_id: item for item in read(folder)}


def test_a_section_of_markdown_is_a_record_with_its_headings_and_lines(tmp_path):
    (tmp_path / "a.md").write_text(MARKDOWN)
    found = list(read(tmp_path))
    assert [
        (each.id, each.metadata.get("heading"), each.metadata["first_line"], each.metadata["last_line"])
        for each in found
    ] == [
        ("a.md", None, 1, 1),
        ("a.md#Mill > Wheel", "Mill > Wheel", 3, 6),
        ("a.md#Mill > Wheel~2", "Mill > Wheel", 8, 9),
        ("a.md#Pond", "Pond", 11, 14),
        ("a.md#Last", "Last", 16, 16),
    ]
    lines = MARKDOWN.split("\n")
    for each in found:
        assert each.text == "\n".join(lines[each.metadata["first_line"] - 1 : each.metadata["last_line"]])
        assert each.metadata["path"] == "a.md"
    assert found[1].text.startswith("# Mill\n\n## Wheel")  # a title alone is no text


def test_a_changed_section_replaces_its_row_and_one_that_went_is_deleted(tmp_path, engine):
    folder, client, journal = tmp_path / "f", memory(), tmp_path / "journal"
    files(folder, **{"a.md": MARKDOWN, "b.txt": "text"})
    options = {"journal": journal, "sync": True}
    assert run(str(folder), engine, CrashingSink(client), **options).written == 6
    files(folder, **{"a.md": MARKDOWN.replace("It stands.", "It runs.").replace("# Last\n", "")})
    sink = CrashingSink(client)
    report = run(str(folder), engine, sink, **options)
    assert (report.written, report.deleted, report.unchanged) == (1, 1, 4)
    assert sink.written == ["a.md#Mill > Wheel~2"] and ("a.md#Last", 0) not in sink.stored


def test_a_file_that_cannot_be_read_keeps_the_rows_that_it_had_and_no_others_stay(tmp_path, engine, caplog):
    folder, client, journal = tmp_path / "f", memory(), tmp_path / "journal"
    files(folder, **{"a.md": MARKDOWN, "a.md.txt": "other", "b.txt": "text", "c.txt": "c", "d.txt": "d"})
    run(str(folder), engine, CrashingSink(client), journal=journal, sync=True)
    files(folder, **{"a.md": b"caf\xe9", "b.txt": b"t\0"})
    (folder / "c.txt").unlink()
    sink = CrashingSink(client)
    report = run(str(folder), engine, sink, journal=journal, sync=True)
    assert (report.failed, report.deleted) == (2, 1)
    left = {identity for identity, _ in sink.stored}
    assert len(left) == 8 and {"a.md", "a.md#Pond", "b.txt", "a.md.txt", "d.txt"} < left and "c.txt" not in left
    letters = (tmp_path / "journal.dead.jsonl").read_text()
    assert "not UTF-8 (byte 3)" in letters and "is no text (byte 1 is NUL)" in letters


def test_what_git_ignores_is_left_out_and_a_name_is_judged_as_the_walk_does(tmp_path):
    (tmp_path / ".git").mkdir()
    files(tmp_path, **{".gitignore": "build/\n*.log.txt\n", "a.txt": "a", "build__b.txt": "b", "x.log.txt": "x"})
    files(tmp_path, **{"sub__c.md": "c", "sub__.gitignore": "!x.log.txt\nd.md\n", "sub__x.log.txt": "x"})
    files(tmp_path, **{"sub__d.md": "d", ".h__e.txt": "e"})
    (tmp_path / "link.txt").symlink_to("a.txt")
    reader = read(tmp_path)
    found = [each.metadata["path"] for each in reader]
    assert found == ["a.txt", "sub/c.md", "sub/x.log.txt"]
    assert reader.skipped.names == ("build/", "link.txt", "x.log.txt", "sub/d.md")
    assert list(walk_folder(tmp_path, below="sub")) == ["sub/c.md", "sub/x.log.txt"]
    every = [
        os.path.relpath(os.path.join(parent, name), tmp_path)
        for parent, _, names in os.walk(tmp_path)
        for name in names
    ]
    assert sorted(name for name in every if reads_file(tmp_path, name)) == found


def test_html_gives_what_is_seen_by_its_headings(tmp_path):
    pytest.importorskip("selectolax")
    page = (
        "<title>no</title><style>no</style><body>before<h1>A <i>mill</i></h1><p>One<br>two   three"
        "<h3>Wheel</h3><ul><li>a<li>b</ul><table><tr><th>x<td>1<tr><td>y<td>2</table><pre>p\n  q</pre>"
        "<script>no()</script><p hidden>no</p><template>no</template><h2>Empty</h2><h2>Pond</h2>caf\xe9"
    )
    files(
        tmp_path, **{"a.html": page.encode("cp1252"), "b.htm": '<meta charset="shift_jis"><p>水車'.encode("shift_jis")}
    )
    files(tmp_path, **{"c.html": "<div>" * 5_000 + "deep", "d.html": "<p> </p>", "e.html": page})
    found = parts(tmp_path)
    assert {name: each.text for name, each in found.items() if name.startswith("a")} == {
        "a.html": "before",
        "a.html#A mill": "A mill\n\nOne\ntwo three",
        "a.html#A mill > Wheel": "Wheel\n\na\n\nb\n\nx | 1\n\ny | 2\n\np\n  q",
        "a.html#A mill > Empty": "Empty",
        "a.html#A mill > Pond": "Pond\n\ncafé",
    }
    assert found["a.html#A mill > Wheel"].metadata == {"path": "a.html", "heading": "A mill > Wheel"}
    assert (found["b.htm"].text, found["c.html"].text, found["d.html"].text) == ("水車", "deep", "")
    assert found["e.html#A mill > Pond"].text.endswith("café")


def docx(path, *, table=True):
    library = pytest.importorskip("docx")
    document = library.Document()
    document.add_heading("Mill", 0)
    document.add_heading("Wheel", 1)
    document.add_paragraph("It turns.")
    if table:
        cells = document.add_table(2, 2)
        for row, texts in zip(cells.rows, [("a", "b"), ("c", "d")], strict=True):
            for cell, text in zip(row.cells, texts, strict=True):
                cell.text = text
        cells.rows[1].cells[0].merge(cells.rows[1].cells[1])
    own = document.styles.add_style("House", 1)
    own.base_style = document.styles["Heading 2"]
    document.add_paragraph("Deeper", style="House")
    document.add_paragraph("It stands.", style="List Bullet")
    document.save(path)


def test_docx_gives_its_sections_with_tables(tmp_path):
    docx(tmp_path / "a.docx")
    found = parts(tmp_path)
    assert {name: each.text for name, each in found.items()} == {
        "a.docx#Mill > Wheel": "Mill\n\nWheel\n\nIt turns.\n\na | b\nc d",
        "a.docx#Mill > Wheel > Deeper": "Deeper\n\nIt stands.",
    }
    assert found["a.docx#Mill > Wheel"].metadata == {"path": "a.docx", "heading": "Mill > Wheel"}


def test_a_docx_that_is_none_is_left_out_with_the_reason(tmp_path):
    docx(tmp_path / "torn.docx")
    torn = (tmp_path / "torn.docx").read_bytes()
    files(
        tmp_path, **{"torn.docx": torn[: len(torn) // 2], "old.docx": b"\xd0\xcf\x11\xe0" + bytes(600), "no.docx": "x"}
    )
    found = parts(tmp_path)
    assert all(isinstance(each, Rejected) and each.parts for each in found.values()) and len(found) == 3
    assert "is encrypted, or a .doc" in found["old.docx"].reason and "BadZipFile" in found["no.docx"].reason


def pdf(*pages, password=None, image=False):
    library = pytest.importorskip("fpdf")
    document = library.FPDF()
    document.set_font("helvetica", size=12)
    for text in pages:
        document.add_page()
        if text:
            document.cell(text=text)
        if image and not text:
            from PIL import Image

            document.image(Image.new("RGB", (8, 8)), w=20)
    if password is not None:
        document.set_encryption(owner_password="owner", user_password=password)
    return bytes(document.output())


def test_a_page_of_a_pdf_is_a_record_with_its_number(tmp_path):
    pytest.importorskip("pypdf")
    files(tmp_path, **{"a.pdf": pdf("The mill", "", "The pond"), "free.pdf": pdf("Of no password", password="")})
    found = parts(tmp_path)
    assert {name: (each.text, each.metadata) for name, each in found.items()} == {
        "a.pdf#page=1": ("The mill", {"path": "a.pdf", "page": 1}),
        "a.pdf#page=2": ("", {"path": "a.pdf", "page": 2}),
        "a.pdf#page=3": ("The pond", {"path": "a.pdf", "page": 3}),
        "free.pdf#page=1": ("Of no password", {"path": "free.pdf", "page": 1}),
    }


def test_a_pdf_that_cannot_be_read_is_left_out_with_the_reason(tmp_path):
    pytest.importorskip("pypdf")
    whole = pdf("The mill")
    files(
        tmp_path,
        **{
            "locked.pdf": pdf("x", password="y"),
            "torn.pdf": whole[:200],
            "no.pdf": "hello",
            "scan.pdf": pdf("A", "", image=True),
        },
    )
    found = parts(tmp_path)
    assert found["locked.pdf"].reason == "is encrypted; save it without a password"
    assert all("is no PDF that can be read" in found[name].reason for name in ("torn.pdf", "no.pdf"))
    page = found["scan.pdf#page=2"]
    assert "is an image without text" in page.reason and not page.parts and page.where.endswith("scan.pdf#page=2")
    assert found["scan.pdf#page=1"].text == "A"


@pytest.mark.door
def test_functions_of_code_are_records_with_their_names_and_lines(tmp_path):
    source = (
        "import os\n\n\ndef long():\n"
        + "    x = 1\n" * 400
        + "\n\ndef find(x):\n    return x\n\n\ndef find(x):\n    pass\n"
    )
    files(tmp_path, **{"src__a.py": source, "empty.py": ""})
    found = parts(tmp_path)
    assert list(found) == ["empty.py", "src/a.py#long", "src/a.py#find", "src/a.py#find~2"]
    assert len(found["src/a.py#long"].text) > 3000  # whole: --chunk cuts it
    about = {"path": "src/a.py", "language": "python", "kind": "function", "name": "find"}
    assert found["src/a.py#find"].metadata == {**about, "first_line": 407, "last_line": 408}


def test_a_file_without_its_package_is_an_error_before_anything_is_read_and_others_are_not(tmp_path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(kinds, "find_spec", lambda name: None if name == "pypdf" else real(name))
    kinds._missing.cache_clear()
    files(tmp_path, **{"a.txt": "a"})
    try:
        assert [each.id for each in read(tmp_path)] == ["a.txt"]
        files(tmp_path, **{"sub__b.pdf": b""})
        with pytest.raises(
            MissingExtraError, match=r"'sub/b.pdf': reading PDF needs pypdf: pip install 'millpond\[files\]'"
        ):
            read(tmp_path)
    finally:
        kinds._missing.cache_clear()


def test_the_pieces_of_a_section_have_lines_of_their_own(tmp_path):
    text = "# Mill\n" + "\n".join(f"Line number {n} of the mill, which is long enough." for n in range(2, 60))
    (tmp_path / "a.md").write_text(text)
    (record,) = read(tmp_path)
    assert (record.metadata["first_line"], record.metadata["last_line"]) == (1, 59)
    chunks = Chunker(lambda piece: len(piece.split()), max_tokens=40, overlap=10).split(record)
    assert len(chunks) > 10
    lines = text.split("\n")
    for chunk in chunks:
        first, last = chunk.metadata["first_line"], chunk.metadata["last_line"]
        assert chunk.text in "\n".join(lines[first - 1 : last])
        assert chunk.text.split("\n")[0] in lines[first - 1] and chunk.text.split("\n")[-1] in lines[last - 1]
        assert chunk.metadata["heading"] == "Mill" and chunk.metadata["path"] == "a.md"
    own = Record("x", text, {"first_line": 5, "last_line": 6})  # of another meaning
    assert {chunk.metadata["first_line"] for chunk in Chunker(lambda p: len(p.split()), max_tokens=40).split(own)} == {
        5
    }


def test_a_verified_run_knows_the_lines_of_pieces(tmp_path, engine):
    folder = files(tmp_path / "f", **{"a.md": "# Mill\n" + "the mill turns\n" * 300, "b.txt": "pond"})
    options = {"journal": tmp_path / "j", "verify": True, "chunking": Chunking(max_tokens=30)}
    client = memory()
    for written in (True, False):  # the second time the rows are compared with a record that was not embedded
        report = ingest(str(folder), engine=engine, sink=CrashingSink(client), show_progress=False, **options)
        assert (report.written > 10) == written and report.verification.good
    row = next(row for row, (record, _) in client["docs"][1].items() if record.chunk == 3)
    record, vectors = client["docs"][1][row]
    client["docs"][1][row] = (Record(record.id, record.text, {**record.metadata, "heading": "Pond"}, chunk=3), vectors)
    report = ingest(str(folder), engine=engine, sink=CrashingSink(client), show_progress=False, **options)
    assert report.verification.different == 1
