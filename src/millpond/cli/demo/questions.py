"""The demo's ten questions, and the choice of passages for its short form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from millpond.ingest.record import Record

SHORT_PASSAGES = 400


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question and its right answers.

    Attributes:
        text: The question, in the words of somebody who does not know the name of the answer.
        answers: Dotted names; each is a right answer. Only the tests read them, never the search.
    """

    text: str
    answers: tuple[str, ...]


QUESTIONS = (
    Question(
        text="how do I read a zip file without unpacking it?",
        answers=("zipfile.ZipFile.read", "zipfile.ZipFile.open", "zipfile.ZipExtFile", "zipfile.ZipExtFile.read"),
    ),
    Question(
        text="how can I count how often each word occurs in a list?",
        answers=("collections.Counter", "collections.Counter.most_common"),
    ),
    Question(
        text="how do I run another program and capture what it prints?",
        answers=("subprocess.run", "subprocess.check_output", "subprocess.getoutput"),
    ),
    Question(
        text="how do I find all files with a certain ending in a folder and everything below it?",
        answers=("glob.glob", "os.walk", "pathlib.Path.rglob", "pathlib.Path.glob"),
    ),
    Question(
        text="how can I remember the results of a slow function?",
        answers=("functools.cache", "functools.lru_cache"),
    ),
    Question(
        text="how do I copy a folder with everything in it?",
        answers=("shutil.copytree",),
    ),
    Question(
        text="how do I make a temporary file that disappears when I am done with it?",
        answers=("tempfile.NamedTemporaryFile", "tempfile.TemporaryFile"),
    ),
    Question(
        text="how can I merge several sorted lists into one?",
        answers=("heapq.merge",),
    ),
    Question(
        text="how do I make a password reset token that nobody can guess?",
        answers=("secrets.token_urlsafe", "secrets.token_hex", "secrets.token_bytes"),
    ),
    Question(
        text="how do I escape text so that it is safe inside HTML?",
        answers=("html.escape",),
    ),
)


def short_of(records: Sequence[Record]) -> list[Record]:
    """At most :data:`SHORT_PASSAGES` records: the answers to the questions, and others chosen by the hash of their ids.

    The order of ``records`` is kept.
    """
    answers = {name for question in QUESTIONS for name in question.answers}
    by_priority = sorted(records, key=lambda record: (record.id not in answers, blake2b(record.id.encode()).digest()))
    kept = {record.id for record in by_priority[:SHORT_PASSAGES]}
    return [record for record in records if record.id in kept]
