"""The repository: no machine-specific paths; the Makefile's targets, and the workflows that call them, exist."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# First folders of absolute paths that exist on one machine only. Joined so that this file does not match.
LOCAL_PATHS = re.compile(
    "(?<![\\w.~:/-])/(?:" + "|".join(["home", "root", "work", "Users", "mnt", "scratch"]) + ")/\\w"
)
TARGETS = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def test_no_file_contains_a_machine_specific_path():
    assert LOCAL_PATHS.search("cd /" + "work/x") and not LOCAL_PATHS.search("https://x.org/home/me")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    matches = []
    for path in (ROOT / name for name in listed.stdout.split("\0") if name):
        if path.is_file():
            matches += [(path, match[0]) for match in LOCAL_PATHS.finditer(path.read_text("utf-8", errors="ignore"))]
    assert not matches


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_every_target_can_be_made(target: str):
    clean = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    run = subprocess.run(["make", "--dry-run", target], cwd=ROOT, env=clean, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


def test_the_workflows_call_targets_that_exist_and_use_no_secret():
    called = set()
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text(encoding="utf-8")
        called |= set(re.findall(r"\bmake ([a-z-]+)", text))
        assert "secrets." not in text.replace("secrets.GITHUB_TOKEN", "")
        assert "permissions:" in text
    called |= set(re.findall(r"^step make ([a-z-]+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE))
    assert called and called <= TARGETS
