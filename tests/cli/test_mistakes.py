"""Every mistake that is known before work begins: exit code 2, one line, no output, and no weights are loaded."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from tests.cli.conftest import FLOAT32, Run

from millpond import Engine

pytest.importorskip("millpond_qdrant")

MISTAKES = {
    "embed none.txt -m {model}": "there is no file or folder at 'none.txt'",
    "embed q.txt -m empty": "empty has no files",
    "embed q.txt -m nobody/nothing": "nobody/nothing ",
    "embed q.txt -m {model} --dimensions 9999": "--dimensions=9999",
    "embed q.txt -m {model} --cache notes.txt": "notes.txt is not a millpond cache",
    "embed q.txt -m {model} --engine dtype=float7": "--engine dtype=float7 is unknown",
    "embed q.txt": "--model",
    "rerank q none.txt -m {model}": "there is no file or folder at 'none.txt'",
    "rerank q q.txt -m empty": "empty has no files",
    "explain q none.txt -m {model}": "there is no file at 'none.txt'",
    "explain q --index none --id a": "none has no index",
    "explain q --text x -m {model} --report no/x.html": "there is no folder",
    "ingest none.jsonl -m {model} --to qdrant+memory:#d": "there is no file or folder at 'none.jsonl'",
    "ingest d.jsonl -m empty --to qdrant+memory:#d": "empty has no files",
    "ingest d.jsonl -m {model} --to bogus": "'bogus'... is no URL of a collection",
    "ingest d.jsonl -m {model} --to nodb+x:y#d": "no installed package writes to 'nodb'",
    "ingest d.jsonl -m {model} --to qdrant+path:notes.txt#d": "is a file; Qdrant keeps its data in a folder",
    "ingest d.jsonl -m {model} --to qdrant+http://u:p@localhost:1#d": "the URL holds credentials",
    "ingest d.jsonl -m {model} --to qdrant+memory:#d --journal notes.txt": "notes.txt is not a journal of millpond",
    "ingest d.jsonl -m {model} --to qdrant+memory:#d --cache notes.txt": "notes.txt is not a millpond cache",
    "ingest d.jsonl -m {model} --to qdrant+memory:#d --report no/x.html": "there is no folder",
    "ingest d.jsonl -m {model} --to qdrant+memory:#d --dimensions 9999": "--dimensions=9999",
    "ingest d.jsonl -m {model} --to qdrant+memory:#d --sink speed=1": "speed=1 is no option of this sink",
    "ingest d.jsonl -m {model} --to qdrant+path:vec#docs --engine max_length=7": "was built by",
    "search qdrant+path:none#docs q": "there is no database of Qdrant at 'none'",
    "search qdrant+path:vec#nope q": "there is no collection 'nope'",
    "search qdrant+path:vec#docs --queries none.txt": "there is no file or folder at 'none.txt'",
    "search qdrant+path:vec#docs q --rerank nobody/nothing": "nobody/nothing ",
    "search qdrant+path:vec#docs q --engine max_length=7": "was built by",
    "search qdrant+path:vec#docs q --dimensions 3": "holds the widths [48], not [3]",
    "advise d.jsonl -m {model}": "--queries",
    "advise d.jsonl -m {model} --queries none.txt": "there is no file or folder at 'none.txt'",
    "advise d.jsonl -m {model} --queries q.txt --qrels none": "there is no file of judgements at 'none'",
    "advise d.jsonl -m {model} --queries q.txt --dimensions 9999": "--dimensions=9999",
    "index build i none.jsonl -m {model}": "there is no file or folder at 'none.jsonl'",
    "index build i d.jsonl -m {model} --dimensions 9999": "--dimensions=9999 is more than",
    "index build notes.txt d.jsonl -m {model}": "notes.txt is a file",
    "index search none q": "none has no index",
    "index stats notes.txt": "notes.txt is a file",
    "cache stats none": "none: there is no such file",
    "cache stats notes.txt": "notes.txt is not a millpond cache",
    "collections list bogus": "'bogus'... is no URL of a collection",
    "collections show qdrant+path:vec#nope": "there is no collection 'nope'",
    "models nobody/nothing": "nobody/nothing ",
    "env nope": "'nope' is only read with --check",
    "nope": "No such command 'nope'",
}
LATER = {"index build notes.txt d.jsonl -m {model}"}  # what the index says of its folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("mistakes")
    (place / "empty").mkdir()
    (place / "notes.txt").write_text("notes")
    (place / "q.txt").write_text("what turns?\n")
    (place / "d.jsonl").write_text('{"id": "a", "text": "a mill"}\n')
    return place


@pytest.fixture
def here(run: Run, place: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    if not (place / "vec").exists():
        run("ingest", "d.jsonl", "-m", model, "--to", "qdrant+path:vec#docs", *FLOAT32, code=0)
    return place


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_exit_2_before_a_model_is_loaded(
    run: Run, here: Path, model: Path, words: str, monkeypatch: pytest.MonkeyPatch
):
    loaded = []

    class Counted(Engine):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)  # type: ignore[arg-type]
            loaded.append(args)

    monkeypatch.setattr("millpond.engine.engine.Engine", Counted)
    before = set(here.iterdir())
    done = run(*shlex.split(words.format(model=model)), code=2)
    assert MISTAKES[words] in done.err and done.err.startswith("millpond: ") and done.err.count("\n") == 1
    assert done.out == "" and set(here.iterdir()) == before
    assert not loaded or words in LATER
