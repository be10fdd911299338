"""The demo's ten questions, and the choice of passages for its short form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

from millpond.ingest import Record

SHORT_PASSAGES = 400

QUESTIONS: Mapping[str, str] = {
    "how do I read a zip file without unpacking it?": (
        "zipfile.ZipFile.read zipfile.ZipFile.open zipfile.ZipExtFile zipfile.ZipExtFile.read"
    ),
    "how can I count how often each word occurs in a list?": "collections.Counter collections.Counter.most_common",
    "how do I run another program and capture what it prints?": (
        "subprocess.run subprocess.check_output subprocess.getoutput"
    ),
    "how do I find all files with a certain ending in a folder and everything below it?": (
        "glob.glob os.walk pathlib.Path.rglob pathlib.Path.glob"
    ),
    "how can I remember the results of a slow function?": "functools.cache functools.lru_cache",
    "how do I copy a folder with everything in it?": "shutil.copytree",
    "how do I make a temporary file that disappears when I am done with it?": (
        "tempfile.NamedTemporaryFile tempfile.TemporaryFile"
    ),
    "how can I merge several sorted lists into one?": "heapq.merge",
    "how do I make a password reset token that nobody can guess?": (
        "secrets.token_urlsafe secrets.token_hex secrets.token_bytes"
    ),
    "how do I escape text so that it is safe inside HTML?": "html.escape",
}
"""Questions in the words of somebody who does not know the name of the answer, and the names of the right answers.

Only the tests and :func:`short_of` read the answers, never the search.
"""


def short_of(records: Sequence[Record]) -> list[Record]:
    """At most :data:`SHORT_PASSAGES` records, in their order: the answers, and others by the hash of their ids."""
    answers = set(" ".join(QUESTIONS.values()).split())
    by_priority = sorted(records, key=lambda record: (record.id not in answers, blake2b(record.id.encode()).digest()))
    kept = {record.id for record in by_priority[:SHORT_PASSAGES]}
    return [record for record in records if record.id in kept]
