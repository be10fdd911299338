"""The site of docs/: its generated pages are current, its reference is complete, and its checks find faults."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path

import pytest
from typer.main import get_command

import millpond
import millpond.errors
from millpond.cli.app import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
STRUCTURE = (DOCS / "structure.md").read_text(encoding="utf-8")
REFERENCE = "\n".join(path.read_text(encoding="utf-8") for path in sorted((DOCS / "reference").glob("*.md")))


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch):
    """Imports a module of docs/site, as mkdocs does: by its bare name, and for as long as it needs it."""
    monkeypatch.syspath_prepend(str(DOCS / "site"))
    before = set(sys.modules)
    yield import_module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == DOCS / "site":
            del sys.modules[name]


def test_the_page_of_models_is_that_of_the_tables(site):
    script = "PYTHONPATH=src python docs/site/models.py"
    assert (DOCS / "models.md").read_text(encoding="utf-8") == site("models").page(), f"out of date: {script}"


def test_the_page_of_doors_is_that_of_its_table(site):
    script = "python docs/site/doors.py"
    assert (DOCS / "doors.md").read_text(encoding="utf-8") == site("doors").page(), f"out of date: {script}"


def test_the_figures_are_those_of_their_script(site):
    figures = site("figures")
    for name, draw in figures.FIGURES.items():
        drawn = (DOCS / "images" / name).read_text(encoding="utf-8")
        assert drawn == draw(), f"{name} is out of date: python docs/site/figures.py"
        assert f"images/{name}" in (DOCS / "concepts.md").read_text(encoding="utf-8")


def test_the_page_of_commands_has_every_option_and_link(site):
    page = site("commands").page()
    sections = dict(re.findall(r"^#+ `(millpond [^`]+)`\n(.*?)(?=^#+ |\Z)", page, re.DOTALL | re.MULTILINE))

    def check(command, name: str) -> None:
        for parameter in (each for each in command.params if not getattr(each, "hidden", False)):
            for flag in filter(lambda word: word.startswith("-"), (*parameter.opts, *parameter.secondary_opts)):
                assert re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", sections[name]), f"{name} {flag}"
        for word, part in getattr(command, "commands", {}).items():
            check(part, f"{name} {word}")

    program = get_command(app)
    for word, command in program.commands.items():
        check(command, f"millpond {word}")
        assert f"[`{word}`](#millpond-{word}): " in page
    assert not re.search(r"^\* \[`.*\.\.\.$", page, re.MULTILINE)  # no sentence is cut


@pytest.mark.parametrize(
    "name",
    [
        "millpond",
        "millpond.ingest",
        "millpond.late_interaction",
        "langchain_millpond",
        "llama_index.embeddings.millpond",
        "llama_index.postprocessor.millpond_rerank",
        "llama_index.retrievers.millpond",
        "llama_index.sparse_embeddings.millpond",
        "millpond_qdrant",
        "millpond_milvus",
        "millpond_lancedb",
        "millpond_pgvector",
    ],
)
def test_the_reference_has_every_public_name(name: str):
    module = import_module(name)
    documented = set(re.findall(r"^::: (\S+)", REFERENCE, re.MULTILINE))
    errors = {error for error in vars(millpond.errors) if error.endswith("Error")}
    for public in set(module.__all__) - {"sink_from_url"}:  # an entry point
        places = {f"{name}.{public}", f"millpond.{public}", f"millpond.late_interaction.{public}"}
        assert public in errors or places & documented, f"docs/reference has no ::: {name}.{public}"


def test_the_reference_names_nothing_that_does_not_exist():
    for name in re.findall(r"^::: (\S+)", REFERENCE, re.MULTILINE):
        module, _, attribute = name.rpartition(".")
        pytest.importorskip(name.partition(".")[0])
        try:
            found = getattr(import_module(module), attribute, None)
        except millpond.errors.MissingExtraError:  # of a door, whose library only `make test-doors` has
            path = (ROOT / "src").joinpath(*module.split(".")).with_suffix(".py")
            found = f"class {attribute}(" in path.read_text(encoding="utf-8")
        assert found or import_module(name), name


def test_the_example_of_a_sink_is_the_one_that_the_shared_tests_check():
    code = (ROOT / "tests" / "ingest" / "memory_sink.py").read_text(encoding="utf-8").split('"""\n', 1)[1].strip()
    assert f"```python\n{code}\n```" in (DOCS / "extending.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")))
def test_the_files_that_a_page_names_exist(page: str):
    """Paths whose first part is a folder of the repository or of the package."""
    text = re.sub(r"^```.*?^```", "", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    roots = (ROOT, ROOT / "src" / "millpond")
    names = re.findall(r"`((?:[\w.-]+/)+[\w.-]*)`", text)
    ours = [name for name in names if any((root / name.split("/")[0]).is_dir() for root in roots)]
    assert not [name for name in ours if not any((root / name).exists() for root in roots)]
    assert len(ours) > 15 or page not in ("extending.md", "structure.md")


def test_the_map_of_the_code_has_every_folder():
    (block,) = re.findall(r"^```\nsrc/millpond/\n(.*?)^integrations/", STRUCTURE, re.DOTALL | re.MULTILINE)
    parts: list[str] = []
    named = set()
    for line in block.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2 - 1
        name = line.split()[0]
        if name.endswith("/"):
            parts = [*parts[:depth], name]
            named.add("".join(parts))
    package = ROOT / "src" / "millpond"
    assert not [name for name in named if not (package / name).is_dir()]
    folders = {f"{path.parent.relative_to(package)}/" for path in package.glob("*/__init__.py")}
    folders |= {f"{path.parent.relative_to(package)}/" for path in package.glob("*/*/__init__.py")}
    assert not sorted(folders - named)


@pytest.mark.parametrize(
    ("html", "problem"),
    [
        ('<a href="b.html#there">b</a> <a href="#here" id="here">a</a> <a href=".">c</a>', None),
        ('<a href="https://x.org">x</a> <link rel="canonical" href="https://x.org/a">', None),
        ('<img src="data:image/png;base64,AA==">', None),
        ('<a href="c.html">c</a>', "a.html links to c.html, which is no file of the site"),
        ('<img src="c%20d.png">', "a.html links to c%20d.png, which is no file of the site"),
        ('<a href="b.html#nowhere">b</a>', "a.html links to b.html#nowhere, and b.html has no such anchor"),
        ('<a href="#nowhere">b</a>', "a.html links to #nowhere, and a.html has no such anchor"),
        ('<script src="https://x.org/a.js"></script>', "a.html loads https://x.org/a.js from another server"),
        ('<script src="//x.org/a.js"></script>', "a.html loads //x.org/a.js from another server"),
        ('<img src="https://x.org/a.png">', "a.html loads https://x.org/a.png from another server"),
        ('<link rel="preconnect" href="https://x.org">', "a.html loads https://x.org from another server"),
        ('<style>@import "https://x.org/a.css";</style>', "a.html loads https://x.org/a.css from another server"),
    ],
    ids=[
        "good", "links out", "data", "no file", "no image", "no anchor", "no own anchor", "script", "no scheme",
        "image", "preconnect", "style",
    ],
)  # fmt: skip
def test_the_check_finds(site, tmp_path: Path, html: str, problem: str | None):
    (tmp_path / "a.html").write_text(f"<html><body>{html}</body></html>", encoding="utf-8")
    (tmp_path / "b.html").write_text('<h2 id="there">b</h2>', encoding="utf-8")
    (tmp_path / "index.html").write_text("", encoding="utf-8")
    (tmp_path / "a.css").write_text("p { background: url(a.png) }", encoding="utf-8")
    assert list(site("check").problems(tmp_path)) == ([] if problem is None else [problem])
