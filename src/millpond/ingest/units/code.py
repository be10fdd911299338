"""Functions and classes of code, by tree-sitter; the lines between them are units of what holds them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from millpond.ingest.units.languages import GRAMMARS, Grammar, parser
from millpond.ingest.units.unit import MAX_CHARACTERS, Unit, lines_of, pieces

if TYPE_CHECKING:
    from tree_sitter import Node

_DEEPEST = 40
_VALUES = frozenset("arrow_function function_expression function generator_function".split())
_NAMES = frozenset(
    "identifier field_identifier type_identifier qualified_identifier destructor_name operator_name".split()
)
# Lines right above a definition that belong to it.
_COMMENTS = ("#", "//", "/*", "*", "*/", "--", "@", "[", "///", "<!--")
# A class of so few characters is one unit; lines between functions of fewer are no unit of their own.
_SMALL_CLASS, _SMALL_GAP = MAX_CHARACTERS // 2, 60


@dataclass(frozen=True)
class _Definition:
    """A function or class on lines ``first`` to before ``stop``, from 0."""

    kind: str
    name: str
    first: int
    stop: int
    inner: Sequence[_Definition] = ()


def definitions(text: str, language: str, *, most: int | None = MAX_CHARACTERS) -> Iterator[Unit]:
    """The units of a file of code, of at most so many characters: every line with a word in it is in one."""
    lines = lines_of(text)
    tree = parser(language).parse(text.encode())
    grammar = GRAMMARS[language]
    found = _ordered(_below(tree.root_node, grammar, 0), 0, len(lines))
    yield from _cover(lines, found, 0, len(lines), kind="text", name="", most=most)


def _cover(
    lines: Sequence[str],
    found: Sequence[_Definition],
    start: int,
    stop: int,
    *,
    kind: str,
    name: str,
    most: int | None,
) -> Iterator[Unit]:
    """The units of the lines of a file or a class: its definitions, and what is between them."""
    here = start
    for index, each in enumerate(found):
        first = _with_comments(lines, here, each.first)
        following = found[index + 1].first if index + 1 < len(found) else stop
        last = each.stop
        if _size(lines[here:first]) < _SMALL_GAP:
            first = here
        if index + 1 == len(found) and _size(lines[last:stop]) < _SMALL_GAP:
            last = stop
        yield from pieces(lines[here:first], kind=kind, name=name, first=here + 1, most=most)
        full = f"{name}.{each.name}" if name else each.name
        body = lines[first:last]
        if each.inner and sum(map(len, body)) > _SMALL_CLASS:
            yield from _cover(lines, each.inner, first, last, kind=each.kind, name=full, most=most)
        else:
            yield from pieces(body, kind=each.kind, name=full, first=first + 1, most=most)
        here = min(last, following) if last != stop else last
    yield from pieces(lines[here:stop], kind=kind, name=name, first=here + 1, most=most)


def _with_comments(lines: Sequence[str], start: int, first: int) -> int:
    """The first of the comments right above a line, not before ``start``."""
    while first > start and lines[first - 1].strip().startswith(_COMMENTS):
        first -= 1
    return first


def _size(lines: Sequence[str]) -> int:
    return sum(len(line.strip()) for line in lines)


def _below(node: Node, grammar: Grammar, depth: int) -> Iterator[_Definition]:
    """The definitions in a node, without those in functions."""
    if depth == _DEEPEST:
        return
    for child in node.named_children:
        kind = child.type
        if kind in grammar.functions or (kind in grammar.values and _is_function(child)):
            yield _Definition("function", _name(child), *_span(child))
        elif kind in grammar.classes:
            body = child.child_by_field_name("body")
            if body is None and kind.endswith("_specifier"):
                continue  # a type that is only named
            first, stop = _span(child)
            inner = _ordered(_below(child, grammar, depth + 1), first, stop)
            yield _Definition("class", _name(child), first, stop, inner)
        elif kind in grammar.between:
            inside = list(_below(child, grammar, depth + 1))
            first, stop = _span(child)
            if len(inside) == 1 and kind.endswith(("_definition", "_declaration", "export_statement")):
                (one,) = inside  # with its decorators, its template or `export`
                yield _Definition(one.kind, one.name, first, stop, one.inner)
            else:
                yield from inside


def _span(node: Node) -> tuple[int, int]:
    end = node.end_point
    return node.start_point[0], end[0] + (1 if end[1] else 0) or 1


def _ordered(found: Iterator[_Definition], start: int, stop: int) -> list[_Definition]:
    """Definitions that share no line; of two that do, the first."""
    kept: list[_Definition] = []
    for each in sorted(found, key=lambda one: one.first):
        if each.first >= (kept[-1].stop if kept else start) and each.first < each.stop <= stop:
            kept.append(each)
    return kept


def _is_function(node: Node) -> bool:
    values = (
        child.child_by_field_name("value") for child in node.named_children if child.type == "variable_declarator"
    )
    return any(value is not None and value.type in _VALUES for value in values)


def _name(node: Node) -> str:
    """The name of a definition; empty for one without."""
    for field in ("name", "declarator", "type"):
        child = node.child_by_field_name(field)
        while child is not None:
            text = (child.text or b"").decode(errors="replace")
            inner = child.child_by_field_name("declarator") or child.child_by_field_name("name")
            if field != "declarator" or child.type in _NAMES or inner is None:
                return text.split("\n")[0][:100]
            child = inner
    for child in node.named_children:  # of Go's types and JavaScript's constants the name is one node further
        if child.child_by_field_name("name") is not None:
            return _name(child)
    return ""
