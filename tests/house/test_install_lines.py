"""Every ``pip install`` that the program or a page recommends is true: the extras exist, and so do the folders."""

from __future__ import annotations

import re
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("integrations/*/README.md")])
MODULES = sorted([*ROOT.glob("src/**/*.py"), *ROOT.glob("integrations/*/*/**/*.py")])
PROJECTS: dict[str, Any] = {
    table["name"]: table
    for table in (
        tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        for path in [ROOT / "pyproject.toml", *ROOT.glob("integrations/*/pyproject.toml")]
    )
}
# Packages of others that the seven packages require, with the extras that they ask for.
OTHERS: dict[str, set[str]] = {}
for table in PROJECTS.values():
    for text in chain(table["dependencies"], *table.get("optional-dependencies", {}).values()):
        OTHERS.setdefault(canonicalize_name(Requirement(text).name), set()).update(Requirement(text).extras)
UNPUBLISHED = re.compile(r"not on an index yet|no release on a package index yet", re.IGNORECASE)


def arguments(text: str) -> list[str]:
    """What stands behind each ``pip install`` of a text, up to the end of the command."""
    found = re.findall(r"""pip install ((?:'[^']*'|"[^"]*"|(?!and\b)[\w.\[\],/=<>-]+)(?: +(?:\./|'|")\S+)*)""", text)
    words = [word for line in found for word in re.findall(r"""'[^']*'|"[^"]*"|\S+""", line)]
    return [word.strip("'\"").rstrip(".,;:)`") if word[0] in "'\"" else word.rstrip(".,;:)`") or "." for word in words]


def problem(word: str) -> str | None:
    """Why an argument of ``pip install`` is wrong."""
    folder, bracket, extras = word.partition("[")
    if folder.startswith("."):
        path = ROOT / folder / "pyproject.toml"
        if not path.is_file():
            return f"{folder} has no pyproject.toml"
        name = tomllib.loads(path.read_text(encoding="utf-8"))["project"]["name"]
        word = f"{name}{bracket}{extras}"
    try:
        requirement = Requirement(word)
    except InvalidRequirement:
        return "is no requirement"
    name = canonicalize_name(requirement.name)
    if name in PROJECTS:
        unknown = requirement.extras - PROJECTS[name].get("optional-dependencies", {}).keys()
    elif name in OTHERS:
        unknown = requirement.extras - OTHERS[name]
    else:
        return f"{name} is no dependency of the seven packages"
    return f"{name} has no extra {', '.join(sorted(unknown))}" if unknown else None


LINES = [
    (path, word)
    for path in [*PAGES, *MODULES]
    if "tests" not in path.parts and path.name != "CHANGELOG.md"
    for word in arguments(path.read_text(encoding="utf-8"))
    if not word.endswith("/")  # a message that puts a name behind it
]


@pytest.mark.parametrize(
    ("path", "word"), LINES, ids=[f"{n}: {path.relative_to(ROOT)}: {word}" for n, (path, word) in enumerate(LINES)]
)
def test_what_is_recommended_can_be_installed(path: Path, word: str):
    assert problem(word) is None


def lacking(words: list[str]) -> set[str]:
    """Our own packages that an installation of folders requires and does not name: pip would ask an index for them."""
    named, required = set(), set()
    for word in words:
        folder, _, extras = word.partition("[")
        table = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        named.add(table["name"])
        chosen = [table.get("optional-dependencies", {})[extra] for extra in re.findall(r"\w+", extras)]
        required |= {canonicalize_name(Requirement(text).name) for text in chain(table["dependencies"], *chosen)}
    return (required & PROJECTS.keys()) - named


CHECKOUT_LINES = [
    (path, words)
    for path in [*PAGES, ROOT / "notebooks" / "README.md"]
    for line in re.findall(r"pip install [^\n`]*", path.read_text(encoding="utf-8"))
    if (words := re.findall(r"(?<![^\s'\"])\.(?:/[\w/-]+)?(?:\[[\w,]+\])?(?![^\s'\"])", line))
]


@pytest.mark.parametrize(
    ("path", "words"), CHECKOUT_LINES, ids=[f"{n}: {path.parent.name}" for n, (path, _) in enumerate(CHECKOUT_LINES)]
)
def test_a_line_for_a_checkout_names_all_of_our_packages_that_it_needs(path: Path, words: list[str]):
    assert lacking(words) == set()


def test_the_lines_are_found():
    words = {word for _, word in LINES}
    assert {"millpond[server]", "millpond[ray]", ".", "./integrations/qdrant", "pymilvus[bulk-writer]"} <= words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("needs ray: pip install 'millpond[ray]'\")", ["millpond[ray]"]),
        ("(`pip install ml_dtypes`), ", ["ml_dtypes"]),
        ("pip install . ./integrations/qdrant\n", [".", "./integrations/qdrant"]),
        ('`pip install ".[server]"` the engine', [".[server]"]),
    ],
    ids=["message", "inline", "folders", "extra of a folder"],
)
def test_the_arguments_of_a_line(text: str, words: list[str]):
    assert arguments(text) == words


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("millpond[sever]", "millpond has no extra sever"),
        ("pymilvus[bulk]", "pymilvus has no extra bulk"),
        ("./integrations/weaviate", "./integrations/weaviate has no pyproject.toml"),
        ("millpond-weaviate", "millpond-weaviate is no dependency of the seven packages"),
        (".[srver]", "millpond has no extra srver"),
    ],
)
def test_a_wrong_line_is_found(word: str, message: str):
    assert problem(word) == message


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_does_not_send_its_reader_to_an_index_without_a_release(page: Path):
    """Until the first release a page that begins with one of our packages says how to install it from a checkout.

    Where millpond is installed, ``pip install 'millpond[server]'`` needs no index for millpond itself.
    """
    text = page.read_text(encoding="utf-8")
    released = not UNPUBLISHED.search((ROOT / "README.md").read_text(encoding="utf-8"))
    blocks = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    ours = [word for word in arguments(blocks) if canonicalize_name(word.partition("[")[0]) in PROJECTS]
    installed = ours and all(word.startswith("millpond[") for word in ours)
    assert released or not ours or UNPUBLISHED.search(text) or (installed and "Where millpond is installed" in text)
