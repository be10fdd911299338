"""sentence-transformers' Router (once Asym): each role's texts run through modules of their own."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millpond.checkpoints.resolve import read_json_object
from millpond.errors import ModelLoadError
from millpond.tasks import Role

NAMES = ("Router", "Asym")
_TEXT = "text"  # the only modality here


@dataclass(frozen=True, kw_only=True)
class Router:
    """The routes of a checkpoint."""

    path: Path  # the file that describes them
    types: Mapping[str, str]  # class of each module, by its folder
    structure: Mapping[str, list[str]]  # folders of each route's modules, in order
    mappings: Mapping[tuple[Any, Any], str]  # routes by (task, modality); `None`: any
    default: str | None  # the route of a text without a role

    def route(self, role: Role | None) -> str | None:
        """The route of a role's texts, in sentence-transformers' order; ``None``: it has none."""
        keys = ((role, _TEXT), (role, None), (None, _TEXT), (None, None))
        mapped = next((self.mappings[key] for key in keys if key in self.mappings), None)
        direct = (name for name in (role, _TEXT) if name in self.structure)
        return mapped or next(direct, None) or (self.default if role is None else None)


def read_router(folder: Path) -> Router:
    """The router whose files are in ``folder``."""
    path = next((folder / name for name in ("router_config.json", "config.json") if (folder / name).is_file()), None)
    path = path or folder / "router_config.json"
    config = read_json_object(path)
    types, structure, options = (config.get(key) or {} for key in ("types", "structure", "parameters"))
    default = options.get("default_route")
    if default is None and options.get("allow_empty_key", True):
        default = next(iter(structure), None)
    mappings = {_key(key, path): route for key, route in (options.get("route_mappings") or {}).items()}
    unknown = [route for route in (default, *mappings.values()) if route is not None and route not in structure]
    listed = [module for modules in structure.values() for module in modules]
    unknown += [module for module in listed if module not in types]
    if unknown or not all(structure.values()) or not structure:
        raise ModelLoadError(
            f"{path}: the Router (once Asym) names {unknown[0] if unknown else 'no modules'}, which the file does not "
            "describe; millpond does not run it"
        )
    return Router(path=path, types=types, structure=structure, mappings=mappings, default=default)


def _key(written: str, path: Path) -> tuple[Any, Any]:
    try:
        task, modality = ast.literal_eval(written)
    except (ValueError, SyntaxError, TypeError) as error:
        raise ModelLoadError(f"{path}: route_mappings has the key {written!r}; it must be (task, modality)") from error
    return task, modality
