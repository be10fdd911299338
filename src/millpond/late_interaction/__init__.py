"""Late interaction: texts as matrices of token vectors, compared token by token."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millpond.late_interaction.maxsim import maxsim
    from millpond.late_interaction.rerank import arerank, rerank
    from millpond.ragged import Ragged

_HOMES = {
    "Ragged": "millpond.ragged",
    "arerank": "millpond.late_interaction.rerank",
    "maxsim": "millpond.late_interaction.maxsim",
    "rerank": "millpond.late_interaction.rerank",
}

__all__ = ["Ragged", "arerank", "maxsim", "rerank"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """Importing a submodule binds it here; this keeps the name its function's, in any order of imports."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
