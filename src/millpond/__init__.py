"""millpond: an in-process pooling engine. Texts in; vectors, scores, labels, rewards and token matrices out."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millpond.cache.vector_cache import VectorCache
    from millpond.engine.async_engine import AsyncEngine
    from millpond.engine.engine import Engine
    from millpond.errors import (
        CacheError,
        DeviceLostError,
        EngineClosedError,
        EngineOverloadedError,
        FingerprintMismatchError,
        IndexCorruptedError,
        IndexLockedError,
        InputTooLongError,
        InvalidDimensionsError,
        InvalidRequestError,
        MillpondError,
        MissingExtraError,
        ModelLoadError,
        SinkError,
        SourceNotFoundError,
        UnknownModelError,
        UnsupportedArchitectureError,
        UnsupportedTaskError,
        WeightMismatchError,
    )
    from millpond.values.inputs import Pair, SpannedText, TokenIds
    from millpond.values.outputs import (
        ClassificationOutput,
        EmbeddingOutput,
        Entity,
        LabelScore,
        RerankOutput,
        RerankResult,
        RewardOutput,
        ScoreOutput,
        SparseEmbeddingOutput,
        TokenClassificationOutput,
        TokenEmbeddingOutput,
        TokenSpans,
        Usage,
    )
    from millpond.values.params import PoolingParams
    from millpond.values.spec import ModelSpec
    from millpond.values.stats import EngineStats, Timings
    from millpond.vectors.ragged import Ragged
    from millpond.vllm.llm import LLM

# The modules of the names, imported on first use, so that `import millpond` is fast and does not import torch.
_HOMES = {
    "cache.vector_cache": "VectorCache",
    "engine.async_engine": "AsyncEngine",
    "engine.engine": "Engine",
    "values.inputs": "Pair SpannedText TokenIds",
    "values.outputs": (
        "ClassificationOutput EmbeddingOutput Entity LabelScore RerankOutput RerankResult RewardOutput ScoreOutput "
        "SparseEmbeddingOutput TokenClassificationOutput TokenEmbeddingOutput TokenSpans Usage"
    ),
    "values.params": "PoolingParams",
    "values.spec": "ModelSpec",
    "values.stats": "EngineStats Timings",
    "vectors.ragged": "Ragged",
    "vllm.llm": "LLM",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [
    "LLM",
    "AsyncEngine",
    "CacheError",
    "ClassificationOutput",
    "DeviceLostError",
    "EmbeddingOutput",
    "Engine",
    "EngineClosedError",
    "EngineOverloadedError",
    "EngineStats",
    "Entity",
    "FingerprintMismatchError",
    "IndexCorruptedError",
    "IndexLockedError",
    "InputTooLongError",
    "InvalidDimensionsError",
    "InvalidRequestError",
    "LabelScore",
    "MillpondError",
    "MissingExtraError",
    "ModelLoadError",
    "ModelSpec",
    "Pair",
    "PoolingParams",
    "Ragged",
    "RerankOutput",
    "RerankResult",
    "RewardOutput",
    "ScoreOutput",
    "SinkError",
    "SourceNotFoundError",
    "SpannedText",
    "SparseEmbeddingOutput",
    "Timings",
    "TokenClassificationOutput",
    "TokenEmbeddingOutput",
    "TokenIds",
    "TokenSpans",
    "UnknownModelError",
    "UnsupportedArchitectureError",
    "UnsupportedTaskError",
    "Usage",
    "VectorCache",
    "WeightMismatchError",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("millpond")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
