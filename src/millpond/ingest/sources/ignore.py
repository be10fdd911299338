"""Files that git ignores: .gitignore of every folder, .git/info/exclude and the user's own file, read without git."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

IGNORE_FILE = ".gitignore"
_GIT = ".git"
_BOM = b"\xef\xbb\xbf"
_CLASSES = frozenset("alnum alpha blank cntrl digit graph lower print punct space upper xdigit".split())
_POSIX = {
    "alnum": "a-zA-Z0-9",
    "alpha": "a-zA-Z",
    "blank": " \\t",
    "cntrl": "\\x00-\\x1f\\x7f",
    "digit": "0-9",
    "graph": "\\x21-\\x7e",
    "lower": "a-z",
    "print": "\\x20-\\x7e",
    "punct": "!-/:-@\\[-`{-~",
    "space": "\\s",
    "upper": "A-Z",
    "xdigit": "0-9a-fA-F",
}


@dataclass(frozen=True)
class _Rule:
    matches: re.Pattern[str]  # of the path below the folder of the rules
    ignores: bool  # False for a line with "!"
    folders: bool  # only folders


@dataclass(frozen=True)
class Rules:
    """The lines of one file; the last one that matches counts."""

    rules: Sequence[_Rule]
    any: re.Pattern[str] | None = field(default=None)  # whether one of them matches, asked first: nearly none does

    @classmethod
    def read(cls, lines: Iterable[str]) -> Rules:
        """The rules of a .gitignore's lines."""
        rules = [rule for line in lines if (rule := _rule(line)) is not None]
        merged = "|".join(f"(?:{rule.matches.pattern})" for rule in rules)
        return cls(rules, re.compile(merged, re.DOTALL) if rules else None)

    def verdict(self, path: str, *, is_folder: bool) -> bool | None:
        """Whether a path below the folder of the rules is ignored; ``None`` if no line matches."""
        if self.any is None or self.any.fullmatch(path) is None:
            return None
        for rule in reversed(self.rules):
            if (is_folder or not rule.folders) and rule.matches.fullmatch(path):
                return rule.ignores
        return None


@dataclass(frozen=True)
class IgnoreStack:
    """The rules that hold in a folder: those of the folders above it, too."""

    levels: Sequence[tuple[str, Rules]]  # the folder of the rules, and the rules; nearest last

    @classmethod
    def above(cls, root: Path) -> IgnoreStack:
        """The rules from above a folder: of the repository that it lies in, and of the user."""
        top = next((each for each in (root, *root.parents) if (each / _GIT).exists()), None)
        stack = cls([(str(top or root), rules) for rules in [_file(_user_file())] if rules])
        if top is not None and top != root:
            for folder in reversed([each for each in root.parents if each.is_relative_to(top)]):
                stack = stack.within(str(folder))
        return stack

    def within(self, folder: str) -> IgnoreStack:
        """The rules in a folder, with its own; the same object if it has none."""
        own = [_file(_exclude_file(Path(folder)))] if os.path.lexists(os.path.join(folder, _GIT)) else []
        own.append(_file(Path(folder, IGNORE_FILE)))
        found = [(folder, rules) for rules in own if rules is not None]
        return IgnoreStack([*self.levels, *found]) if found else self

    def ignores(self, path: str, *, is_folder: bool) -> bool:
        """Whether git ignores a path whose folder it does not ignore."""
        if path.endswith(_GIT) and os.path.basename(path) == _GIT:
            return True
        for folder, rules in reversed(self.levels):
            below = path[len(folder.rstrip(os.sep)) + 1 :].replace(os.sep, "/")
            verdict = rules.verdict(_bytes_of(below), is_folder=is_folder)
            if verdict is not None:
                return verdict
        return False


def _bytes_of(path: str) -> str:
    """A path as the characters that its bytes would be: to git ``?`` and a bracket are one byte."""
    return path if path.isascii() else os.fsencode(path).decode("latin-1")


def _user_file() -> Path:
    home = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path("~/.config").expanduser()) / "git" / "ignore"


def _exclude_file(folder: Path) -> Path:
    """info/exclude of a repository, whose .git may be a file that names the folder."""
    git = folder / _GIT
    with suppress(OSError, ValueError):
        if git.is_file():
            git = folder / git.read_text(encoding="utf-8").partition("gitdir:")[2].strip()
        if (common := git / "commondir").is_file():
            git = git / common.read_text(encoding="utf-8").strip()
    return git / "info" / "exclude"


def _file(path: Path) -> Rules | None:
    """The rules of a file; ``None`` if it is not there. A link is not followed, as git does not."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:
            return Rules.read(file.read().removeprefix(_BOM).decode("latin-1").split("\n"))
    except OSError:
        return None


def _rule(line: str) -> _Rule | None:
    line = line.removesuffix("\r")
    while line.endswith(" ") and not _is_escaped(line, len(line) - 1):
        line = line[:-1]
    if not line or line.startswith("#"):
        return None
    ignores = not line.startswith("!")
    line = line if ignores else line[1:]
    folders = line.endswith("/")
    line = line.removesuffix("/")
    if not line:
        return None
    anywhere = "/" not in line  # the name alone counts, in any folder below
    expression = _expression(line.removeprefix("/"))
    if expression is None:  # a bracket without its end, or a backslash at the end: git matches nothing with it
        return None
    prefix = "(?:.*/)?" if anywhere else ""
    return _Rule(re.compile(prefix + expression, re.DOTALL), ignores, folders)


def _is_escaped(line: str, index: int) -> bool:
    before = line[:index]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1


def _expression(pattern: str) -> str | None:
    """The regular expression of a pattern: ``*`` and ``?`` match no slash, ``**`` between slashes any folders."""
    parts: list[str] = []
    index = 0
    while index < len(pattern):
        if pattern.startswith("**/", index) and (index == 0 or pattern[index - 1] == "/"):
            parts.append("(?:.*/)?")
            index += 3
        elif pattern[index:] == "**" and (index == 0 or pattern[index - 1] == "/"):
            parts.append(".+" if index else ".*")
            index += 2
        elif pattern[index] == "*":
            while index < len(pattern) and pattern[index] == "*":
                index += 1
            parts.append("[^/]*")
        elif pattern[index] == "[":
            found = _bracket(pattern, index)
            if found is None:
                return None
            parts.append(found[0])
            index = found[1]
        elif pattern[index] == "\\":
            if index + 1 == len(pattern):
                return None
            parts.append(re.escape(pattern[index + 1]))
            index += 2
        else:
            parts.append("[^/]" if pattern[index] == "?" else re.escape(pattern[index]))
            index += 1
    return "".join(parts)


def _bracket(pattern: str, start: int) -> tuple[str, int] | None:
    """The set that begins at a bracket, and where it ends; ``None`` if it does not end."""
    index = start + 1
    negated = pattern[index : index + 1] in ("!", "^")
    index += negated
    first, members = index, []
    while index < len(pattern) and (pattern[index] != "]" or index == first):
        if pattern.startswith("[:", index) and (end := pattern.find(":]", index)) > 0:
            name = pattern[index + 2 : end]
            if name not in _CLASSES:
                return None
            members.append(_POSIX[name])
            index = end + 2
            continue
        low, index = _member(pattern, index)
        if pattern[index : index + 1] == "-" and pattern[index + 1 : index + 2] not in ("]", ""):
            high, index = _member(pattern, index + 1)
            if low <= high:
                members.append(f"{re.escape(low)}-{re.escape(high)}")
        else:
            members.append(re.escape(low))
    if index >= len(pattern):
        return None
    content = "".join(members)
    if not content:
        return ("[^/]" if negated else "(?!)"), index + 1
    return f"(?!/)[{'^' if negated else ''}{content}]", index + 1


def _member(pattern: str, index: int) -> tuple[str, int]:
    if pattern[index] == "\\" and index + 1 < len(pattern):
        index += 1
    return pattern[index], index + 1
