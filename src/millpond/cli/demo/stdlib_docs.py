"""The docstrings of the standard library on this machine, as records: the corpus of the demo.

Python sources are parsed and never imported, so no module's import-time code runs. Modules written in C have no source;
for a few that every interpreter has already loaded, the docstrings are read from the loaded objects.
"""

from __future__ import annotations

import ast
import builtins
import collections
import functools
import gc
import inspect
import itertools
import math
import os
import re
import sys
import sysconfig
import time
import tokenize
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

from millpond.errors import InvalidRequestError
from millpond.ingest.record import Record

_SKIPPED_FOLDERS = frozenset(
    "__pycache__ config dist-packages distutils encodings ensurepip idlelib lib-dynload lib2to3 msilib pydoc_data "
    "site-packages test tests turtledemo".split()
)
_SKIPPED_FILES = frozenset(["__main__.py", "ntpath.py", "sre_compile.py", "sre_constants.py", "sre_parse.py"])

# Private modules: the public module under which users know their names.
_PUBLIC_NAMES = {
    "_collections_abc": "collections.abc",
    "_pydatetime": "datetime",
    "_pydecimal": "decimal",
    "_pyio": "io",
    "genericpath": "os.path",
    "posixpath": "os.path",
}
_C_MODULES: tuple[ModuleType, ...] = (builtins, collections, functools, itertools, math, os, sys, time)
_BOUND_ARGUMENT = re.compile(r"^\(\$\w+(, /)?(, )?")  # the argument that a bound method takes from its object
# Older docstrings begin with the signature: "D.pop(k[,d]) -> v, remove ...", "chain(*iterables) --> chain object".
_CALL = re.compile(r"(?:\w+\.)*(\w+)(\([^()]*\))[ \t]*(?:-{1,2}>(?:[ \w]{0,25}\n| None\.| v,))?\s*")
_SENTENCE = re.compile(r"(?<=[\w\"'`)]{2}[.])\s+(?=[A-Z])")  # not "e.g. A"

_MIN_CHARS = 20
_MAX_CHARS = 1000  # about the 256 tokens that the model reads

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def read_stdlib(root: Path | None = None) -> list[Record]:
    """Return every documented public module, class, function and method, in the same order on every run.

    Args:
        root: Folder of the library (default: that of this interpreter).

    Returns:
        Records with the dotted name as ``id``, ``name(signature): docstring`` as ``text``, and in ``metadata`` the
        ``kind`` (module, class, function or method) and the ``summary``, the docstring's first sentence.

    Raises:
        InvalidRequestError: ``root`` has no Python sources.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    files = sorted(_files(root), key=lambda file: file.relative_to(root).parts)
    if not files:
        raise InvalidRequestError(
            f"{str(root)!r} holds no Python sources (a zipped or stripped standard library?); "
            "run the demo with an ordinary Python installation"
        )
    records: dict[str, Record] = {}
    exports: dict[str, str] = {}
    with _garbage_collection_paused():
        for file in files:
            tree = _parse(file)
            if tree is not None:
                module = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
                if file.name == "__init__.py":
                    exports |= _exports(module, tree)
                for record in _of_module(module, tree, exports):
                    records.setdefault(record.id, record)
    for loaded in _C_MODULES:
        for record in _of_loaded(loaded):
            records.setdefault(record.id, record)
    return list(records.values())


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Turn collection off: syntax trees have no cycles, and searching torch's objects doubles the parsing time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _files(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if entry.is_dir():
            if entry.name not in _SKIPPED_FOLDERS and not entry.name.startswith(("config-", "python")):
                yield from _files(entry)
        elif entry.suffix == ".py" and entry.name not in _SKIPPED_FILES:
            yield entry


def _parse(file: Path) -> ast.Module | None:
    try:
        with tokenize.open(file) as source, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old sources contain invalid escapes
            return ast.parse(source.read())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None  # a template, or not Python


def _exports(package: str, tree: ast.Module) -> dict[str, str]:
    """Names that a package's ``__init__`` imports from its own modules: ``{dotted name: name that users know}``.

    A star import maps the whole module: ``{"asyncio.tasks.": "asyncio."}``.
    """
    names: dict[str, str] = {}
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom) or node.level > 1:
            continue
        source = f"{package}.{node.module or ''}".rstrip(".") if node.level else node.module or ""
        if source.startswith(f"{package}."):
            for alias in node.names:
                name = "" if alias.name == "*" else alias.name
                names[f"{source}.{name}"] = f"{package}.{alias.asname or name}"
    return names


def _of_module(module: str, tree: ast.Module, exports: dict[str, str]) -> Iterator[Record]:
    public = _PUBLIC_NAMES.get(module, module)
    hidden = any(part.startswith("_") for part in public.split("."))
    if not hidden and public == module:
        yield from _record(module, "", "module", ast.get_docstring(tree))
    for node, names, kind in _definitions(tree.body, (), "function"):
        name = f"{public}.{names[0]}"
        if name in exports:
            name = exports[name]
        elif f"{public}." in exports and _in_all(tree, names[0]):
            name = exports[f"{public}."] + names[0]
        elif hidden:
            continue
        yield from _record(".".join((name, *names[1:])), _signature(node, kind), kind, ast.get_docstring(node))


def _definitions(
    body: list[ast.stmt], outer: tuple[str, ...], kind: str
) -> Iterator[tuple[_Definition, tuple[str, ...], str]]:
    """Yield (definition, nested names, kind) of public definitions, also those inside ``if`` and ``try``."""
    for node in body:
        if isinstance(node, _Definition):
            if node.name.startswith("_"):
                continue
            names = (*outer, node.name)
            if isinstance(node, ast.ClassDef):
                yield node, names, "class"
                yield from _definitions(node.body, names, "method")
            else:
                yield node, names, kind
        elif isinstance(node, ast.If | ast.Try):
            for part in (node.body, node.orelse, getattr(node, "finalbody", [])):
                yield from _definitions(part, outer, kind)
            for handler in getattr(node, "handlers", []):
                yield from _definitions(handler.body, outer, kind)


def _in_all(tree: ast.Module, name: str) -> bool:
    """Whether a star import takes the name: ``__all__`` lists it, or there is no literal ``__all__``."""
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.List | ast.Tuple)
            and any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)
        ):
            return any(isinstance(entry, ast.Constant) and entry.value == name for entry in node.value.elts)
    return True


def _signature(node: _Definition, kind: str) -> str:
    if isinstance(node, ast.ClassDef):
        inits = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
        return _signature(inits[0], "method") if inits else ""
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    if any(name.endswith("property") for name in decorators):
        return ""
    arguments = node.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    for variadic in (arguments.vararg, arguments.kwarg):
        if variadic is not None:
            variadic.annotation = None
    if kind == "method" and "staticmethod" not in decorators:
        first = arguments.posonlyargs or arguments.args
        if len(first) > len(arguments.defaults) - (0 if first is arguments.args else len(arguments.args)):
            del first[:1]  # self or cls
    return f"({ast.unparse(arguments)})"


def _of_loaded(module: ModuleType) -> Iterator[Record]:
    prefix = "" if module is builtins else f"{module.__name__}."
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or inspect.ismodule(value):
            continue
        if inspect.isbuiltin(value):
            yield from _loaded(prefix + name, value, "function")
        elif inspect.isclass(value) and (value.__module__ == module.__name__):
            yield from _loaded(prefix + name, value, "class")
            for method in sorted(method for method in vars(value) if not method.startswith("_")):
                member = getattr(value, method)  # vars() would give static methods wrapped
                if inspect.isroutine(member):
                    yield from _loaded(f"{prefix}{name}.{method}", member, "method")


def _loaded(name: str, value: object, kind: str) -> Iterator[Record]:
    signature = _BOUND_ARGUMENT.sub("(", getattr(value, "__text_signature__", None) or "")
    yield from _record(name, signature.replace("<unrepresentable>", "..."), kind, inspect.cleandoc(value.__doc__ or ""))


def _record(name: str, signature: str, kind: str, doc: str | None) -> Iterator[Record]:
    """Yield a record, or nothing if the docstring is too short or not prose."""
    doc = doc or ""
    call = _CALL.match(doc)
    if call and name.endswith(call[1]) and (rest := doc[call.end() :].lstrip("->: ")):
        signature, doc = signature or call[2], rest
    paragraphs = [part for part in (" ".join(part.split()) for part in doc.split("\n\n")) if part]
    text = " ".join(paragraphs)
    if len(text) < _MIN_CHARS or not text.isprintable() or text.startswith(">>>"):
        return
    metadata = {"kind": kind, "summary": _SENTENCE.split(paragraphs[0])[0]}
    yield Record(name, f"{name}{signature}: {text}"[:_MAX_CHARS], metadata)
