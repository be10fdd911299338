"""Standard output that is full or closed, and a disk without room: a sentence, exit code 1, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.contract
FULL = "/dev/full"
if not os.path.exists(FULL):
    pytest.skip("this system has no device that is always full", allow_module_level=True)

TEXTS = "".join(f"the mill turns {number} times\n" for number in range(300))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("written") / "texts.txt"
    path.write_text(TEXTS, encoding="utf-8")
    return path


def run(words: Sequence[object], *, before: str = "", after: str = "", limit: str = "") -> subprocess.CompletedProcess:
    program = " ".join([f"'{sys.executable}'", "-m", "millpond", *(f"'{word}'" for word in words)])
    return subprocess.run(
        ["bash", "-c", f"{limit} {before} {program} {after}"], capture_output=True, text=True, timeout=100
    )


COMMANDS = {
    "embed": ["embed", "{texts}", "-m", "{model}"],
    "explain": ["explain", "mill", "--text", "a mill", "-m", "{model}"],
    "models": ["models"],
    "help": ["search", "--help"],
    "ingest": ["ingest", "{docs}", "-m", "{model}", "--to", "qdrant+memory:#docs"],
    "advise": ["advise", "{texts}", "--queries", "{texts}", "-m", "{model}"],
}


def filled(words: Sequence[str], texts: Path, model: Path) -> list[str]:
    docs = texts.with_name("docs.jsonl")
    docs.write_text('{"id": "a", "text": "a mill"}\n', encoding="utf-8")
    return [word.format(texts=texts, model=model, docs=docs) for word in words]


@pytest.mark.parametrize("name", ["embed", "models", "help", "ingest"])
def test_a_full_standard_output_is_said_to_be(name: str, texts: Path, model: Path):
    done = run(filled(COMMANDS[name], texts, model), after=f"> {FULL}")
    said = "millpond: standard output cannot be written (No space left on device); what was printed is not complete"
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == said and "Traceback" not in done.stderr


def test_a_reader_that_has_read_enough_is_no_error(texts: Path, model: Path):
    done = run(filled(COMMANDS["embed"], texts, model), after="| head -1")
    assert done.stdout.count("\n") == 1 and "Error" not in done.stderr and "millpond:" not in done.stderr


def test_a_closed_standard_output_is_said_to_be(texts: Path, model: Path):
    done = run(filled(COMMANDS["embed"], texts, model), after=">&-")
    assert done.returncode == 1 and done.stderr.startswith("millpond: standard output is closed; ")


def test_a_file_of_vectors_on_a_full_disk_is_named(texts: Path, model: Path):
    done = run([*filled(COMMANDS["embed"], texts, model), "-o", FULL])
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"millpond: '{FULL}' cannot be written (No space left on device)" in done.stderr


@pytest.mark.parametrize("name", ["explain", "ingest", "advise"])
def test_a_page_without_room_is_named(name: str, texts: Path, model: Path, tmp_path: Path):
    """A limit of a file's size, since a test mounts no small disk; a page is more than its 1024 bytes."""
    if name != "explain":
        pytest.importorskip("matplotlib")
    page = tmp_path / "page.html"
    program = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        f"sys.argv[1:] = {[*filled(COMMANDS[name], texts, model), '--report', str(page)]!r}; "
        "sys.dont_write_bytecode = True; "  # Python 3.11 keeps a compiled file that the limit has cut off
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY)); "
        "from millpond.cli.app import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert f"'{page}' cannot be written (File too large)" in done.stderr and not page.exists()
