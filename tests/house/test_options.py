"""One word for one option over all commands, and one help text for one word."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from tests.house.options import lines, table

WORDS = Path(__file__).with_name("options.txt")
RETIRED = {"--out", "--html", "--top-n", "--widths", "--width", "--json"}
# Words whose value has two forms: a width or several, and what `explain` and `serve` take a name and a folder for.
FORMS = {
    "--output": {"PATH", "DIR", "FOLDER"},  # a file, the folder of a checkpoint, or that of mteb's results
    "--dimensions": {"N", "N,N"},
    "--index": {"INDEX", "NAME=PATH"},
    "--id": {"COLUMN", "ID"},
    "--text": {"COLUMN,...", "TEXT", "FIELD"},  # of several columns, a text itself, where a stored one is
    "--source": {"MODEL", "SOURCE"},  # what a file of weights was made of, and where records come from
    "--to": {"URL", "NEW-URL"},
    "--log-level": {"", "LEVEL"},
}


def test_the_table_of_options_is_that_of_the_program():
    written = WORDS.read_text(encoding="utf-8").splitlines()
    assert written == list(lines()), "python tests/house/options.py > tests/house/options.txt, and read the difference"


def test_one_word_has_one_meaning():
    several = {word: texts for word, texts in table().items() if len(texts) > 1}
    assert not several
    forms = defaultdict(set)
    for word, metavar in table():
        forms[word].add(metavar)
    assert {word: seen for word, seen in forms.items() if len(seen) > 1 and not seen <= FORMS.get(word, set())} == {}


def test_one_meaning_has_one_word():
    words = defaultdict(set)
    for (word, _), texts in table().items():
        for text in texts:
            words[text].add(word)
    assert {text: seen for text, seen in words.items() if len(seen) > 1} == {}
    assert not RETIRED & {word for word, _ in table()}
    # A file or folder to write is --output, a page --report, and what is printed has a --format.
    assert {metavar for word, metavar in table() if word == "--output"} == FORMS["--output"]
