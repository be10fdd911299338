"""Models for the library mteb, over an engine, and tasks made of local files.

The names are imported when they are used: they need mteb (``pip install 'millpond[mteb]'``), which needs torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from millpond.errors import MissingExtraError

if TYPE_CHECKING:
    from millpond.mteb.beir import beir_task
    from millpond.mteb.choice import model_of
    from millpond.mteb.cross_encoder import MillpondCrossEncoder
    from millpond.mteb.encoder import MillpondEncoder
    from millpond.mteb.evaluation import TaskScores, evaluate
    from millpond.mteb.late_interaction import MillpondLateInteraction
    from millpond.mteb.pairs import sts_task
    from millpond.mteb.sparse import MillpondSparseEncoder

# No module has the name of a function: importing it would hide the function.
_HOMES = {
    "MillpondCrossEncoder": "cross_encoder",
    "MillpondEncoder": "encoder",
    "MillpondLateInteraction": "late_interaction",
    "MillpondSparseEncoder": "sparse",
    "TaskScores": "evaluation",
    "beir_task": "beir",
    "evaluate": "evaluation",
    "model_of": "choice",
    "sts_task": "pairs",
}

__all__ = [
    "MillpondCrossEncoder",
    "MillpondEncoder",
    "MillpondLateInteraction",
    "MillpondSparseEncoder",
    "TaskScores",
    "beir_task",
    "evaluate",
    "model_of",
    "sts_task",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{home}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("mteb", "torch", "datasets", "pydantic"):
            raise MissingExtraError(
                f"{__name__}.{name} needs mteb, and {error.name} is missing: pip install 'millpond[mteb]'"
            ) from None
        raise


def __dir__() -> list[str]:
    return sorted(__all__)
