"""The repository: no machine-specific paths, all targets of the Makefile, no repeated installation."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = (
    "install demo test test-integrations test-all test-lowest coverage fuzz check format bench notebooks docs test-gpu "
    "bench-gpu packages check-dockerfile constraints clean help"
).split()
# First folders of absolute paths that exist on one machine only. Joined so that this file does not match.
LOCAL_PATHS = re.compile(
    "(?<![\\w.~:/-])/(?:" + "|".join(["home", "root", "work", "Users", "mnt", "scratch"]) + ")/\\w"
)


def files() -> list[Path]:
    """Files that git tracks, and new files that it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_contains_a_machine_specific_path():
    matches = []
    for path in files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        matches += [f"{path.relative_to(ROOT)}: {match[0]}" for match in LOCAL_PATHS.finditer(text)]
    assert not matches


@pytest.mark.parametrize("text", ["cd /" + "work/x", '"/' + 'home/me/x"', "=/" + "root/x"])
def test_a_machine_specific_path_is_found(text: str):
    assert LOCAL_PATHS.search(text)


@pytest.mark.parametrize("text", ["https://x.org/home/me", "~/work/x", "shared/work/x", "/etc/hosts"])
def test_other_paths_are_allowed(text: str):
    assert not LOCAL_PATHS.search(text)


def make(*words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    return subprocess.run(["make", *words], cwd=cwd, env=clean, capture_output=True, text=True, timeout=60)


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@needs_make
def test_help_names_every_target():
    listed = make("help").stdout
    assert all(re.search(rf"^  make {target}\s", listed, re.MULTILINE) for target in TARGETS), listed


@needs_make
@pytest.mark.parametrize("target", TARGETS)
def test_every_target_exists(target: str):
    run = make("--dry-run", target)
    assert run.returncode == 0, run.stderr


@needs_make
@pytest.mark.parametrize("target", ["demo", "test", "check", "install"])
def test_the_installation_runs_once(target: str, tmp_path: Path):
    projects = [
        path.relative_to(ROOT) for path in [ROOT / "pyproject.toml", *ROOT.glob("integrations/*/pyproject.toml")]
    ]
    for name in ("Makefile", "constraints.txt", *map(str, projects)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
        os.utime(tmp_path / name, (1000, 1000))
    first = make("--dry-run", target, cwd=tmp_path).stdout
    assert "-m venv .venv" in first
    assert first.index("torch==") < first.index("--editable"), "torch goes first"
    assert all(f"--editable integrations/{path.parent.name}" in first for path in projects[1:])

    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").touch()
    os.utime(tmp_path / ".venv" / "bin" / "python", (1500, 1500))
    (tmp_path / ".venv" / ".installed").touch()
    os.utime(tmp_path / ".venv" / ".installed", (2000, 2000))
    assert " pip " not in make("--dry-run", target, cwd=tmp_path).stdout

    os.utime(tmp_path / "integrations" / "qdrant" / "pyproject.toml", (3000, 3000))
    again = make("--dry-run", target, cwd=tmp_path).stdout
    assert "--editable" in again
    assert "-m venv" not in again
