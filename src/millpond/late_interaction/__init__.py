"""Late interaction: texts as matrices of token vectors, compared token by token."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millpond.late_interaction.index.arguments import SearchOptions
    from millpond.late_interaction.index.base import LateInteractionIndex
    from millpond.late_interaction.index.documents import AddReport, Hit, IndexStats, StoredDocument
    from millpond.late_interaction.memory.index import MemoryIndex
    from millpond.late_interaction.plaid.index import PlaidIndex
    from millpond.late_interaction.scoring.explanation import TokenMatch
    from millpond.late_interaction.scoring.similarity import maxsim
    from millpond.vectors.ragged import Ragged

# No module has the name of a function: importing it would hide the function.
_HOMES = {
    "AddReport": "millpond.late_interaction.index.documents",
    "Hit": "millpond.late_interaction.index.documents",
    "IndexStats": "millpond.late_interaction.index.documents",
    "LateInteractionIndex": "millpond.late_interaction.index.base",
    "MemoryIndex": "millpond.late_interaction.memory.index",
    "PlaidIndex": "millpond.late_interaction.plaid.index",
    "Ragged": "millpond.vectors.ragged",
    "SearchOptions": "millpond.late_interaction.index.arguments",
    "StoredDocument": "millpond.late_interaction.index.documents",
    "TokenMatch": "millpond.late_interaction.scoring.explanation",
    "maxsim": "millpond.late_interaction.scoring.similarity",
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
