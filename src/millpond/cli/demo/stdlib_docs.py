"""The docstrings of the standard library on this machine, as records: the corpus of the demo.

Sources are parsed and never imported. Modules written in C have no source; the docstrings of a few, which every
interpreter has loaded, are read from their objects.
"""

from __future__ import annotations

import ast
import builtins
import collections
import functools
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
from pathlib import Path
from types import ModuleType

from millpond import InvalidRequestError
from millpond.ingest import Record

_SKIPPED = frozenset(
    "__pycache__ config dist-packages distutils encodings ensurepip idlelib lib-dynload lib2to3 msilib pydoc_data "
    "site-packages test tests turtledemo __main__.py ntpath.py sre_compile.py sre_constants.py sre_parse.py".split()
)
# Private modules: the public module under which users know their names. Those of a package count to the package.
_PUBLIC_NAMES = {
    "_collections_abc": "collections.abc",
    "_pydatetime": "datetime",
    "_pydecimal": "decimal",
    "_pyio": "io",
    "genericpath": "os.path",
    "posixpath": "os.path",
}
_C_MODULES: tuple[ModuleType, ...] = (builtins, collections, functools, itertools, math, os, sys, time)
_SELF = re.compile(r"^\(\$?(self|cls|module|type|iterable)\b(, /)?(, )?")  # what a bound method gets from its object
_SENTENCE = re.compile(r"(?<=[\w\"'`)]{2}[.])\s+(?=[A-Z])")  # not "e.g. A"
_MIN_CHARS = 20
_MAX_CHARS = 1000  # about the 256 tokens that the model reads

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def read_stdlib(root: Path | None = None) -> list[Record]:
    """Return every documented public module, class, function and method, in the same order on every run."""
    root = root or Path(sysconfig.get_path("stdlib"))
    files = sorted(_files(root), key=lambda file: file.relative_to(root).parts)
    if not files:
        raise InvalidRequestError(
            f"{str(root)!r} holds no Python sources (a zipped or stripped standard library?); "
            "run the demo with an ordinary Python installation"
        )
    records: dict[str, Record] = {}
    for file in files:
        module = ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        for record in _of_module(module, file):
            records.setdefault(record.id, record)
    for loaded in _C_MODULES:
        for record in _of_loaded(loaded):
            records.setdefault(record.id, record)
    return list(records.values())


def _files(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if entry.name in _SKIPPED or entry.name.startswith(("config-", "python")):
            continue
        if entry.is_dir():
            yield from _files(entry)
        elif entry.suffix == ".py":
            yield entry


def _of_module(module: str, file: Path) -> Iterator[Record]:
    try:
        with tokenize.open(file) as source, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old sources contain invalid escapes
            tree = ast.parse(source.read())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return  # a template, or not Python
    package, _, name = module.rpartition(".")
    public = _PUBLIC_NAMES.get(module, package if name.startswith("_") else module)
    if not public or public.startswith("_"):
        return
    if public == module:
        yield from _record(module, "", "module", ast.get_docstring(tree))
    for node, names, kind in _definitions(tree.body, (public,), "function"):
        yield from _record(".".join(names), _signature(node, kind), kind, ast.get_docstring(node))


def _definitions(
    body: list[ast.stmt], outer: tuple[str, ...], kind: str
) -> Iterator[tuple[_Definition, tuple[str, ...], str]]:
    """Yield (definition, nested names, kind) of public definitions, also those inside ``if`` and ``try``."""
    for node in body:
        if isinstance(node, _Definition) and not node.name.startswith("_"):
            names = (*outer, node.name)
            yield node, names, "class" if isinstance(node, ast.ClassDef) else kind
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node.body, names, "method")
        elif isinstance(node, ast.If | ast.Try):
            handlers = [handler.body for handler in getattr(node, "handlers", [])]
            for part in (node.body, node.orelse, getattr(node, "finalbody", []), *handlers):
                yield from _definitions(part, outer, kind)


def _signature(node: _Definition, kind: str) -> str:
    if isinstance(node, ast.ClassDef):
        inits = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
        return _signature(inits[0], "method") if inits else ""
    if any(ast.unparse(decorator).endswith("property") for decorator in node.decorator_list):
        return ""
    signature = f"({ast.unparse(node.args)})"
    return _SELF.sub("(", signature) if kind == "method" else signature


def _of_loaded(module: ModuleType) -> Iterator[Record]:
    prefix = "" if module is builtins else f"{module.__name__}."
    for name, value in sorted(vars(module).items()):
        if name.startswith("_"):
            continue
        if inspect.isbuiltin(value):
            yield from _loaded(prefix + name, value, "function")
        elif inspect.isclass(value) and value.__module__ == module.__name__:
            yield from _loaded(prefix + name, value, "class")
            for method in sorted(method for method in vars(value) if not method.startswith("_")):
                if inspect.isroutine(member := getattr(value, method)):  # vars() would give static methods wrapped
                    yield from _loaded(f"{prefix}{name}.{method}", member, "method")


def _loaded(name: str, value: object, kind: str) -> Iterator[Record]:
    signature = _SELF.sub("(", getattr(value, "__text_signature__", None) or "")
    yield from _record(name, signature.replace("<unrepresentable>", "..."), kind, inspect.cleandoc(value.__doc__ or ""))


def _record(name: str, signature: str, kind: str, doc: str | None) -> Iterator[Record]:
    """Yield a record, or nothing if the docstring is too short or not prose."""
    paragraphs = [part for part in (" ".join(part.split()) for part in (doc or "").split("\n\n")) if part]
    text = " ".join(paragraphs)
    if len(text) >= _MIN_CHARS and text.isprintable() and not text.startswith(">>>"):
        metadata = {"kind": kind, "summary": _SENTENCE.split(paragraphs[0])[0]}
        yield Record(name, f"{name}{signature}: {text}"[:_MAX_CHARS], metadata)
