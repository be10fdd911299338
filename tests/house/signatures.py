"""The public signatures as text, one line per name.

After an intended change: ``python tests/house/signatures.py > tests/house/signatures.txt``.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, is_typeddict

PACKAGES = (
    "millpond",
    "millpond.ingest",
    "millpond.late_interaction",
    "millpond.vllm",
    "langchain_millpond",
    "llama_index.embeddings.millpond",
    "llama_index.postprocessor.millpond_rerank",
    "llama_index.retrievers.millpond",
    "llama_index.sparse_embeddings.millpond",
    "millpond_qdrant",
    "millpond_milvus",
    "millpond_lancedb",
    "millpond_pgvector",
)


def surface() -> list[str]:
    """Lines of every public name with its signature, in a stable order."""
    return [line for name in PACKAGES for line in _package(importlib.import_module(name))]


def own_members(cls: type) -> dict[str, Any]:
    """Members that a class defines or inherits from another millpond class; not those of a framework."""
    bases = [cls] if hasattr(cls, "model_fields") else [base for base in cls.__mro__ if "millpond" in base.__module__]
    members = {name: member for base in reversed(bases) for name, member in vars(base).items()}
    # A method that wraps the framework's own has its signature, which is the framework's to change.
    return {name: member for name, member in members.items() if "millpond" in getattr(member, "__module__", "millpond")}


def _package(package: ModuleType) -> Iterator[str]:
    for name in sorted(package.__all__):
        value = getattr(package, name)
        path = f"{package.__name__}.{name}"
        if is_typeddict(value):
            yield from (f"{path}[{key!r}]: {kind}" for key, kind in inspect.get_annotations(value).items())
        elif inspect.isclass(value):
            yield from _class(path, value)
        elif inspect.isfunction(value):
            yield path + str(inspect.signature(value))
        else:
            yield f"{path}: {value!r}" if isinstance(value, str | int) else f"{path}: {type(value).__name__}"


def _class(path: str, cls: type) -> Iterator[str]:
    bases = ", ".join(base.__name__ for base in cls.__bases__ if base is not object)
    fields = getattr(cls, "model_fields", None)
    if fields is not None:  # pydantic: fields inherited from the framework are left out
        yield f"{path} <- {bases}"
        ours = [base for base in cls.__mro__ if "millpond" in base.__module__]
        annotations = {name: kind for base in ours for name, kind in inspect.get_annotations(base).items()}
        for name, field in fields.items():
            if name in annotations:
                yield f"{path}.{name}: {annotations[name]} = {_default(field)}"
    else:
        # The constructor of an exception is listed only if the class defines one.
        own = "__init__" in cls.__dict__ or not issubclass(cls, BaseException)
        yield f"{path}{inspect.signature(cls) if own else ''} <- {bases or 'object'}"
    for name, member in sorted(own_members(cls).items()):
        if name.startswith("_") or (fields is not None and name in fields):
            continue
        if isinstance(member, property) or hasattr(member, "attrname"):
            yield f"{path}.{name} (property)"
        elif isinstance(member, staticmethod | classmethod):
            yield f"{path}.{name}{inspect.signature(member.__func__)} ({type(member).__name__})"
        elif inspect.isfunction(member):
            kind = "async " if inspect.iscoroutinefunction(member) else ""
            yield f"{kind}{path}.{name}{inspect.signature(member)}"


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    return "factory" if field.default_factory is not None else repr(field.default)


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in surface())
