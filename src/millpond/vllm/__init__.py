"""vLLM's names and defaults over the engine: ``LLM``, its offline class, and what the server shares with it.

Code for vLLM's pooling models runs with ``from millpond.vllm import LLM, PoolingParams`` as its only change.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millpond.vllm.llm import LLM
    from millpond.vllm.outputs import ClassificationData, EmbeddingData, PoolingData, RequestOutput, ScoringData
    from millpond.vllm.params import PoolingParams

_DATA = ("ClassificationData", "EmbeddingData", "PoolingData", "RequestOutput", "ScoringData")
_HOMES = {"LLM": "llm", "PoolingParams": "params"} | dict.fromkeys(_DATA, "outputs")

__all__ = ["LLM", "ClassificationData", "EmbeddingData", "PoolingData", "PoolingParams", "RequestOutput", "ScoringData"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
