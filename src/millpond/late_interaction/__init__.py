"""Late interaction: texts as matrices of token vectors, compared token by token."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millpond.late_interaction.documents import AddReport, Hit, IndexStats, StoredDocument
    from millpond.late_interaction.explanation import TokenMatch
    from millpond.late_interaction.index import LateInteractionIndex
    from millpond.late_interaction.index_arguments import SearchOptions
    from millpond.late_interaction.memory.index import MemoryIndex
    from millpond.late_interaction.plaid.index import PlaidIndex
    from millpond.late_interaction.similarity import maxsim
    from millpond.ragged import Ragged

# No module has the name of a function: importing it would hide the function.
_HOMES = {
    "AddReport": "millpond.late_interaction.documents",
    "Hit": "millpond.late_interaction.documents",
    "IndexStats": "millpond.late_interaction.documents",
    "LateInteractionIndex": "millpond.late_interaction.index",
    "MemoryIndex": "millpond.late_interaction.memory.index",
    "PlaidIndex": "millpond.late_interaction.plaid.index",
    "Ragged": "millpond.ragged",
    "SearchOptions": "millpond.late_interaction.index_arguments",
    "StoredDocument": "millpond.late_interaction.documents",
    "TokenMatch": "millpond.late_interaction.explanation",
    "maxsim": "millpond.late_interaction.similarity",
}

__all__ = [
    "AddReport",
    "Hit",
    "IndexStats",
    "LateInteractionIndex",
    "MemoryIndex",
    "PlaidIndex",
    "Ragged",
    "SearchOptions",
    "StoredDocument",
    "TokenMatch",
    "maxsim",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
