"""The demo's corpus: which docstrings of the standard library are read, and that no module is imported."""

import pytest

from millpond.cli.demo.questions import QUESTIONS, SHORT_PASSAGES, short_of
from millpond.cli.demo.stdlib_docs import read_stdlib
from millpond.errors import InvalidRequestError


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
    assert texts(library(tmp_path, {"pond.py": source})) == {
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


def test_private_modules_have_the_names_that_users_know(tmp_path):
    files = {
        "mill/__init__.py": "from ._wheel import *\n",
        "mill/_wheel.py": 'def turn():\n    """Turn the wheel once."""\n',
        "mill/stone.py": '''
class Stone:
    """It grinds all the corn."""
    def grind(self):
        """Grind some corn now."""
''',
        "_pydecimal.py": 'class Decimal:\n    """A number for millers."""\n',
        "_secret.py": 'def whisper():\n    """Private by its module."""\n',
    }
    assert texts(library(tmp_path, files)) == {
        "mill.turn": "mill.turn(): Turn the wheel once.",
        "mill.stone.Stone": "mill.stone.Stone: It grinds all the corn.",
        "mill.stone.Stone.grind": "mill.stone.Stone.grind(): Grind some corn now.",
        "decimal.Decimal": "decimal.Decimal: A number for millers.",
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


def test_a_library_without_sources_is_an_error(tmp_path):
    with pytest.raises(InvalidRequestError, match="holds no Python sources"):
        read_stdlib(tmp_path)


def test_the_library_of_this_python(records):
    """Thousands of records, each once, in a fixed order, built-in modules included, nothing private and no tests."""
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


def test_there_are_ten_questions_and_the_library_has_their_answers(records):
    ids = {record.id for record in records}
    assert len(QUESTIONS) == 10
    assert not [question for question, names in QUESTIONS.items() if not ids & set(names.split())]


def test_the_short_form_keeps_the_answers_and_draws_the_rest_by_name(records):
    few = short_of(records)
    ids = [record.id for record in few]
    assert len(ids) == SHORT_PASSAGES
    assert ids == [record.id for record in records if record.id in set(ids)]
    answers = set(" ".join(QUESTIONS.values()).split()) & {record.id for record in records}
    assert answers <= set(ids)
    assert len(ids) - len(answers) > 300
    # A passage more or less in another Python changes little of what is drawn.
    assert len(set(ids) - {record.id for record in short_of(records[:-500])}) <= 60
