"""millpond: an in-process pooling engine. Texts in; vectors, scores, labels, rewards and token matrices out."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millpond.cache.vector_cache import VectorCache
    from millpond.engine.async_engine import AsyncEngine
    from millpond.engine.engine import Engine
    from millpond.engine.stats import EngineStats, Timings
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
    from millpond.inputs import Pair, SpannedText, TokenIds
    from millpond.outputs import (
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
    from millpond.params import PoolingParams
    from millpond.spec import ModelSpec
    from millpond.vectors.ragged import Ragged
    from millpond.vllm.llm import LLM

# Imported on first use, so that `import millpond` is fast and does not import torch.
_HOMES = {
    "AsyncEngine": "engine.async_engine",
    "CacheError": "errors",
    "ClassificationOutput": "outputs",
    "EmbeddingOutput": "outputs",
    "DeviceLostError": "errors",
    "Engine": "engine.engine",
    "EngineClosedError": "errors",
    "EngineOverloadedError": "errors",
    "EngineStats": "engine.stats",
    "Entity": "outputs",
    "FingerprintMismatchError": "errors",
    "IndexCorruptedError": "errors",
    "IndexLockedError": "errors",
    "InputTooLongError": "errors",
    "InvalidDimensionsError": "errors",
    "InvalidRequestError": "errors",
    "LLM": "vllm.llm",
    "LabelScore": "outputs",
    "MillpondError": "errors",
    "MissingExtraError": "errors",
    "ModelLoadError": "errors",
    "ModelSpec": "spec",
    "Pair": "inputs",
    "PoolingParams": "params",
    "Ragged": "vectors.ragged",
    "RerankOutput": "outputs",
    "RerankResult": "outputs",
    "RewardOutput": "outputs",
    "ScoreOutput": "outputs",
    "SinkError": "errors",
    "SourceNotFoundError": "errors",
    "SpannedText": "inputs",
    "SparseEmbeddingOutput": "outputs",
    "Timings": "engine.stats",
    "TokenClassificationOutput": "outputs",
    "TokenEmbeddingOutput": "outputs",
    "TokenIds": "inputs",
    "TokenSpans": "outputs",
    "UnknownModelError": "errors",
    "UnsupportedArchitectureError": "errors",
    "UnsupportedTaskError": "errors",
    "Usage": "outputs",
    "VectorCache": "cache.vector_cache",
    "WeightMismatchError": "errors",
}

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
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
