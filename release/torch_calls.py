"""Whether a torch has what millpond calls: every name, and a signature that each call fits.

A GPU machine has the torch that it has, and most of the CUDA path runs on no machine without one. So the calls are read
from millpond's sources, and each is bound to the signature that torch has for it:

    python release/torch_calls.py            the torch of this interpreter: its objects, and its stubs for builtins
    python release/torch_calls.py FOLDER     the torch whose package is in FOLDER, read and not imported

The second takes a wheel that this machine could not import, without the libraries that it depends on:

    pip download --no-deps --dest wheels torch==2.12.0
    unzip -q wheels/torch-2.12.0-*.whl -d torch-2.12.0
    python release/torch_calls.py torch-2.12.0

It prints a line for each call that does not fit and each name that is missing, says which parameters this torch lacks
and what is done without them, and exits with 1 if something is missing that nothing is done about.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parents[1] / "src" / "millpond"

# Calls of methods, whose receivers a reader of sources does not know, and calls with parameters from a dictionary.
METHODS = """
torch.Tensor.copy_(host, non_blocking=True)
torch.Tensor.data_ptr()
torch.Tensor.index_copy_(0, places, states)
torch.Tensor.index_select(0, rows)
torch.Tensor.masked_fill_(hidden, value)
torch.Tensor.pin_memory()
torch.Tensor.repeat_interleave(groups, 1)
torch.Tensor.to(device, non_blocking=True)
torch.cuda.CUDAGraph.replay()
torch.cuda.Event.query()
torch.cuda.Event.record(stream)
torch.cuda.Event.synchronize()
torch.cuda.Stream.synchronize()
torch.cuda.Stream.wait_stream(stream)
torch.nn.attention.flex_attention.flex_attention(q, k, v, score_mod=f, block_mask=b, scale=s, enable_gqa=True)
torch.nn.attention.varlen.varlen_attn(q, k, v, c, c, m, m, scale=s, window_size=w)
"""

# Parameters that some supported release lacks, and what is done without them.
ROADS = {
    ("torch.nn.attention.varlen.varlen_attn", "enable_gqa"): "keys and values are repeated for the query heads",
    ("torch.nn.attention.varlen.varlen_attn", "seqused_k"): "the reference kernel serves calls with limited keys",
    ("torch.compile", "recompile_limit"): "each kind of FlexAttention call has torch's default limit of compilations",
}

# What is read from an object that no stub describes: operators, and settings made by assignment at import.
_UNDESCRIBED = ("torch.ops.",)


@dataclass(frozen=True)
class Call:
    """A call, or a mere mention of a name, in a line of millpond's sources."""

    name: str  # dotted, from torch.
    where: str
    positional: int = 0
    keywords: tuple[str, ...] = ()
    complete: bool = True  # whether no further arguments come out of a sequence or a dictionary
    mention: bool = False


@dataclass
class _File:
    """The names that a file of millpond imports from torch, by the names that they have there."""

    names: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, tree: ast.AST) -> _File:
        names = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.partition(".")[0] == "torch":
                        names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
            elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
                names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        return cls(names)

    def dotted(self, node: ast.AST) -> str | None:
        """The full name of an expression such as ``F.pad``; ``None`` if it is none of torch's."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.names:
            return None
        return ".".join([self.names[node.id], *reversed(parts)])


@cache
def calls(folder: Path = SOURCES) -> list[Call]:
    """Every call of torch in the sources of ``folder`` and in the table above, and every name of torch there."""
    found = [_call(node, name, "the table of methods") for node, name in _table()]
    for path in sorted(folder.rglob("*.py")):
        tree = ast.parse(path.read_text())
        file, where = _File.of(tree), path.relative_to(folder)
        called = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (name := file.dotted(node.func)) is not None:
                called.add(node.func)
                found.append(_call(node, name, f"{where}:{node.lineno}"))
        inner = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node not in called | inner:
                name = file.dotted(node)
                if name is not None:
                    found.append(Call(name, f"{where}:{node.lineno}", mention=True))
        found += [Call(name, str(where), mention=True) for name in file.names.values() if name != "torch"]
    return [call for call in found if not call.name.startswith(_UNDESCRIBED)]


def _table() -> Iterator[tuple[ast.Call, str]]:
    file = _File({"torch": "torch"})
    for line in METHODS.split("\n"):
        if line:
            node = ast.parse(line, mode="eval").body
            assert isinstance(node, ast.Call)
            name = file.dotted(node.func)
            assert name is not None
            yield node, name


def _call(node: ast.Call, name: str, where: str) -> Call:
    starred = any(isinstance(argument, ast.Starred) for argument in node.args)
    return Call(
        name,
        where,
        positional=sum(not isinstance(argument, ast.Starred) for argument in node.args),
        keywords=tuple(keyword.arg for keyword in node.keywords if keyword.arg is not None),
        complete=not starred and all(keyword.arg is not None for keyword in node.keywords),
    )


Signatures = list[inspect.Signature]


class Stubs:
    """A torch read from its files: modules, and stubs for what is compiled."""

    def __init__(self, package: Path) -> None:
        """``package``: the folder ``torch`` itself."""
        self._package = package
        self._modules: dict[str, dict[str, list[ast.AST]] | None] = {}

    @cached_property
    def version(self) -> str:
        """As its metadata says, or its version file."""
        for metadata in self._package.parent.glob("torch-*.dist-info/METADATA"):
            return metadata.read_text().partition("\nVersion: ")[2].partition("\n")[0]
        return "unknown"

    def signatures(self, name: str) -> Signatures | None:
        """The signatures of a dotted name, more than one if it is overloaded; ``[]``: anything; ``None``: missing."""
        nodes = self._find(name)
        if nodes is None:
            return None
        functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        written = [node for node in functions if not _decorated(node, "overload")]
        owner = self._find(name.rpartition(".")[0])
        method = bool(owner) and isinstance(owner[0], ast.ClassDef)
        if functions:
            return [_signature(node, bound=method) for node in written or functions]
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                for constructor in ("__init__", "__new__"):
                    made = self._member(node, name, constructor)
                    if made:
                        return [_signature(f, bound=True) for f in made if isinstance(f, ast.FunctionDef)]
        return []

    def _find(self, name: str, depth: int = 0) -> list[ast.AST] | None:
        """The definitions of a dotted name: functions, a class, assignments; ``[]``: a module; ``None``: missing."""
        if depth > 12:
            return None
        parts = name.split(".")
        for cut in range(len(parts), 0, -1):
            module = ".".join(parts[:cut])
            names = self._module(module)
            if names is None:
                continue
            if cut == len(parts):
                return []
            found = self._in_module(module, names, parts[cut], depth)
            for i in range(cut + 1, len(parts)):
                if not found:
                    return None if found is None else []
                if not isinstance(found[0], ast.ClassDef):
                    return []  # an attribute of an object
                found = self._member(found[0], ".".join(parts[:i]), parts[i], depth)
            return found
        return None

    def _in_module(self, module: str, names: dict[str, list[ast.AST]], name: str, depth: int) -> list[ast.AST] | None:
        for node in names.get(name, ()):
            target = _alias(node, name, module, is_package=self._is_package(module))
            if target is not None and target != f"{module}.{name}":
                if not target.startswith("torch."):
                    return []  # from another package, such as math
                found = self._find(target, depth + 1)
                if found is not None:
                    return found
        own = [node for node in names.get(name, ()) if not isinstance(node, ast.ImportFrom | ast.Import)]
        functions = [node for node in own if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        if functions or own:
            return functions or own
        if self._module(f"{module}.{name}") is not None:
            return []
        if module == "torch":  # filled at import from the compiled part
            for stub in ("torch._C._VariableFunctions", "torch._C"):
                nodes = (self._module(stub) or {}).get(name)
                if nodes:
                    return nodes
        for node in names.get("*", ()):
            source = _alias(node, "*", module, is_package=self._is_package(module))
            assert source is not None
            if source.startswith("torch."):
                found = self._find(f"{source.removesuffix('*')}{name}", depth + 1)
                if found is not None:
                    return found
        return None

    def _member(self, owner: ast.ClassDef, path: str, name: str, depth: int = 0) -> list[ast.AST] | None:
        own = [node for key, node in _definitions(owner.body) if key == name]
        if own:
            return own
        for base in owner.bases:
            dotted = _File({"torch": "torch", "_C": "torch._C"}).dotted(base)
            candidates = [dotted] if dotted else []
            if isinstance(base, ast.Name):
                candidates = [f"{path.rpartition('.')[0]}.{base.id}", f"{self._home(owner)}.{base.id}"]
            for candidate in candidates:
                found = self._find(candidate, depth + 1)
                if found and isinstance(found[0], ast.ClassDef) and found[0] is not owner:
                    member = self._member(found[0], candidate, name, depth + 1)
                    if member:
                        return member
        return None

    def _home(self, owner: ast.ClassDef) -> str:
        """The module in which a class was found."""
        for module, names in self._modules.items():
            if names is not None and owner in names.get(owner.name, ()):
                return module
        return "torch"

    def _is_package(self, module: str) -> bool:
        return (self._package.parent / Path(*module.split("."))).is_dir()

    def _module(self, module: str) -> dict[str, list[ast.AST]] | None:
        """The definitions of a module by name; a stub beside it adds what it lacks."""
        if module not in self._modules:
            base = self._package.parent / Path(*module.split("."))
            files = [base.with_suffix(".pyi"), base / "__init__.pyi", base.with_suffix(".py"), base / "__init__.py"]
            there = [path for path in files if path.is_file()]
            names: dict[str, list[ast.AST]] | None = {} if there else None
            for path in there:
                assert names is not None
                new: dict[str, list[ast.AST]] = {}
                for name, node in _definitions(ast.parse(path.read_text()).body):
                    new.setdefault(name, []).append(node)
                names |= {name: nodes for name, nodes in new.items() if name not in names}
            self._modules[module] = names
        return self._modules[module]


def _definitions(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """Names that statements define, also inside conditions."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, node
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    yield target.id, node
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node
        elif isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _definitions(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _definitions(handler.body)


def _alias(node: ast.AST, name: str, module: str, *, is_package: bool) -> str | None:
    """What a name of a module stands for, if it is imported or assigned from elsewhere."""
    if isinstance(node, ast.ImportFrom):
        home = node.module or ""
        if node.level:
            above = module.split(".")
            above = above[: len(above) - node.level + is_package]
            home = ".".join([*above, *([home] if home else [])])
        imported = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
        return f"{home}.{imported}"
    if isinstance(node, ast.Assign):
        value = node.value
        if isinstance(value, ast.Call) and value.args:  # _add_docstr(torch._C._nn.gelu, ...)
            value = value.args[0]
        if isinstance(value, ast.Name):
            return f"{module}.{value.id}"
        return _File({"torch": "torch", "_C": "torch._C"}).dotted(value)
    return None


def _decorated(node: ast.AST, name: str) -> bool:
    return any(name in ast.unparse(decorator) for decorator in getattr(node, "decorator_list", []))


def _signature(node: ast.AST, *, bound: bool) -> inspect.Signature:
    """The signature of a definition; ``bound``: without its first parameter, if it is a method's."""
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    written = node.args
    positional = [*written.posonlyargs, *written.args]
    defaults = [inspect.Parameter.empty] * (len(positional) - len(written.defaults)) + [None] * len(written.defaults)
    kinds = [inspect.Parameter.POSITIONAL_ONLY] * len(written.posonlyargs)
    kinds += [inspect.Parameter.POSITIONAL_OR_KEYWORD] * len(written.args)
    parameters = [
        inspect.Parameter(argument.arg, kind, default=default)
        for argument, kind, default in zip(positional, kinds, defaults, strict=True)
    ]
    if bound and not _decorated(node, "staticmethod"):
        parameters = parameters[1:]
    if written.vararg:
        parameters.append(inspect.Parameter(written.vararg.arg, inspect.Parameter.VAR_POSITIONAL))
    for argument, default in zip(written.kwonlyargs, written.kw_defaults, strict=True):
        empty = inspect.Parameter.empty if default is None else None
        parameters.append(inspect.Parameter(argument.arg, inspect.Parameter.KEYWORD_ONLY, default=empty))
    if written.kwarg:
        parameters.append(inspect.Parameter(written.kwarg.arg, inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)


class Objects:
    """The torch of this interpreter; what has no signature of its own is read from its stubs."""

    def __init__(self) -> None:
        import torch

        self.version: str = torch.__version__
        self._stubs = Stubs(Path(torch.__file__).parent)

    def signatures(self, name: str) -> Signatures | None:
        """As :meth:`Stubs.signatures`."""
        try:
            made, owner = _object(name)
        except (ImportError, AttributeError):
            return None
        if not callable(made):
            return []
        try:
            signature = inspect.signature(made)
        except (TypeError, ValueError):
            return self._stubs.signatures(name) or []
        if inspect.isclass(owner) and inspect.isfunction(made):  # a method, without its receiver
            signature = signature.replace(parameters=list(signature.parameters.values())[1:])
        return [signature]


def _object(name: str) -> tuple[Any, Any]:
    """The object of a dotted name, and what it was found in."""
    parts = name.split(".")
    owner, made = None, importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        owner = made
        if not hasattr(made, part):
            importlib.import_module(".".join(parts[:i]))
        made = getattr(made, part)
    return made, owner


def problem(call: Call, signatures: Signatures | None) -> str | None:
    """What is wrong with a call; ``None``: nothing."""
    if signatures is None:
        return "is missing"
    if call.mention or not signatures:
        return None
    reasons = []
    for signature in signatures:
        bind = signature.bind if call.complete else signature.bind_partial
        try:
            bind(*[None] * call.positional, **dict.fromkeys(call.keywords))
        except TypeError as error:
            reasons.append(str(error))
        else:
            return None
    given = ", ".join([*["_"] * call.positional, *(f"{keyword}=" for keyword in call.keywords)])
    return f"does not take ({given}): {reasons[0]}"


def report(torch: Stubs | Objects) -> tuple[list[str], list[str]]:
    """(a line for each problem, a line for each parameter that is lacking and dispensable)."""
    problems = []
    for call in calls():
        wrong = problem(call, torch.signatures(call.name))
        if wrong is not None:
            problems.append(f"{call.name} {wrong} ({call.where})")
    roads = []
    for (name, parameter), instead in ROADS.items():
        signatures = torch.signatures(name)
        assert signatures, name
        if not any(parameter in signature.parameters for signature in signatures):
            roads.append(f"{name} has no {parameter}: {instead}")
    return list(dict.fromkeys(problems)), roads


def main(arguments: Sequence[str]) -> int:
    """Print the report; 1 if there are problems."""
    torch: Stubs | Objects = Stubs(Path(arguments[0]) / "torch") if arguments else Objects()
    problems, roads = report(torch)
    print(f"torch {torch.version}: {len(calls())} calls and names, {len(problems)} problems")
    for line in (*roads, *problems):
        print(f"  {line}")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
