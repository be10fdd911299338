"""Files that git ignores, against git itself."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from millpond.ingest.sources.ignore import IgnoreStack, Rules

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
NAMES = ["a", "b", "ab", "a.py", "b.log", "build", "docs", "A", "a b", "[x]", "a-b", "#a", "!a", "ä", "x ", "a.b.c"]
PATTERNS = """
a b ab *.py *.log build/ docs/ /a /build a/b a/* a/** **/a **/a/b a/**/b * */ ? ?? a? [ab] [!a] [^a]b [a-c]*
[x] \\[x\\] []a] [!]a] [[:alpha:]] [[:digit:]]* [[:nonsense:]] [a a\\ \\#a \\!a #a !a !*.py !a/b !build/ a**
**a a**b /** ** **/ */a /*/b a\\ b *.* *.b.* x\\ A [z-a] [a-] [-a] [\\]a] a/ /a/ foo/../a ä ?.py docs/*.py
docs/**/*.py !docs/a.py **/build/** [!/]a a[/]b
""".split()
PATTERNS += ["a b", "x ", "x\\ ", "  ", "a  ", "a\t", "/", "//", "!", "\\", "a\\", "!!a", "a b/"]


def git_ignores(root: Path, paths: list[str]) -> set[str]:
    """What git says of the paths."""
    environment = {
        **os.environ,
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "XDG_CONFIG_HOME": str(root / "none"),
    }
    run = subprocess.run(
        ["git", "check-ignore", "-z", "--stdin", "--no-index"],
        cwd=root, env=environment, input="\0".join(paths).encode(), capture_output=True,
    )  # fmt: skip
    assert run.returncode in (0, 1), run.stderr
    return set(run.stdout.decode().split("\0")) - {""}


def walked(root: Path) -> tuple[list[str], set[str]]:
    """All paths, and those that the rules ignore, with all that is below."""
    every, ignored = [], set()

    def visit(folder: str, stack: IgnoreStack | None) -> None:
        stack = stack.within(folder) if stack is not None else None
        for entry in sorted(os.scandir(folder), key=lambda each: each.name):
            if entry.name in (".git", "none"):
                continue
            name = os.path.relpath(entry.path, root)
            every.append(name)
            out = stack is None or stack.ignores(entry.path, is_folder=entry.is_dir())
            if out:
                ignored.add(name)
            if entry.is_dir():
                visit(entry.path, None if out else stack)

    visit(str(root), IgnoreStack.above(root))
    return every, ignored


@needs_git
@pytest.mark.contract
@pytest.mark.parametrize("seed", range(12))
def test_git_ignores_the_same_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    chance = random.Random(seed)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    folders = [tmp_path]
    for _ in range(14):
        folder = chance.choice(folders) / chance.choice(NAMES)
        if not folder.exists():
            folder.mkdir()
            folders.append(folder)
    for folder in folders:
        for name in chance.sample(NAMES, 7):
            if not (folder / name).exists():
                (folder / name).write_text("x")
        if folder == tmp_path or chance.random() < 0.4:
            chosen = [
                chance.choice(["", "", "", "!"]) + each for each in chance.sample(PATTERNS, chance.choice([1, 2, 5, 9]))
            ]
            (folder / ".gitignore").write_text("\n".join(chosen) + chance.choice(["", "\n", "\r\n"]))
    (tmp_path / ".git" / "info" / "exclude").write_text("\n".join(chance.sample(PATTERNS, 2)))
    every, ignored = walked(tmp_path)
    assert ignored == git_ignores(tmp_path, every)


@needs_git
@pytest.mark.contract
def test_git_reads_each_pattern_in_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One pattern at a time, so that none hides another."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    folders = ("", "a", "docs", "docs/a", "build", "foo")
    for folder in folders:
        (tmp_path / folder).mkdir(exist_ok=True)
    for folder in folders:
        for name in NAMES:
            path = tmp_path / folder / name
            if not path.exists():
                path.write_text("x")
    matched = 0
    for pattern in PATTERNS:
        (tmp_path / ".gitignore").write_text(pattern + "\n")
        every, ignored = walked(tmp_path)
        assert ignored == git_ignores(tmp_path, every), pattern
        matched += bool(ignored)
    assert matched > len(PATTERNS) / 2


def test_rules_of_the_repository_above_hold_in_a_folder_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "config" / "git").mkdir(parents=True)
    (tmp_path / "config" / "git" / "ignore").write_text("*.swp\n")
    repository = tmp_path / "repository"
    (repository / ".git" / "info").mkdir(parents=True)
    (repository / ".git" / "info" / "exclude").write_text("private/\n")
    (repository / ".gitignore").write_text("*.log\n/src/made.py\n")
    source = repository / "src"
    source.mkdir()
    (source / ".gitignore").write_text("!keep.log\n")
    stack = IgnoreStack.above(source).within(str(source))

    def ignored(name: str, *, is_folder: bool = False) -> bool:
        return stack.ignores(str(source / name), is_folder=is_folder)

    assert ignored("x.log") and ignored("made.py") and ignored("a.swp") and ignored("private", is_folder=True)
    assert ignored(".git", is_folder=True)
    assert not ignored("keep.log") and not ignored("private") and not ignored("a.py")
    (repository / ".gitignore").unlink()
    (repository / ".git" / "info" / "exclude").unlink()
    again = IgnoreStack.above(source).within(str(source))
    assert not again.ignores(str(source / "x.log"), is_folder=False)


def test_a_worktree_has_the_excludes_of_its_repository(tmp_path: Path):
    main = tmp_path / "main" / ".git"
    (main / "info").mkdir(parents=True)
    (main / "info" / "exclude").write_text("secret\n")
    own = main / "worktrees" / "one"
    own.mkdir(parents=True)
    (own / "commondir").write_text("../..\n")
    tree = tmp_path / "one"
    tree.mkdir()
    (tree / ".git").write_text(f"gitdir: {own}\n")
    stack = IgnoreStack.above(tree).within(str(tree))
    assert stack.ignores(str(tree / "secret"), is_folder=False)


def test_the_last_line_that_matches_counts():
    rules = Rules.read(["*.log", "!keep.log", "# comment", "", "build/"])
    assert rules.verdict("a/x.log", is_folder=False) is True
    assert rules.verdict("a/keep.log", is_folder=False) is False
    assert rules.verdict("build", is_folder=True) is True
    assert rules.verdict("build", is_folder=False) is None
    assert rules.verdict("# comment", is_folder=False) is None
