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

# Imported on first use, so that `import millpond` is fast and does not import torch.
_HOMES = {
    "AsyncEngine": "engine.async_engine",
    "CacheError": "errors",
    "ClassificationOutput": "values.outputs",
    "EmbeddingOutput": "values.outputs",
    "DeviceLostError": "errors",
    "Engine": "engine.engine",
    "EngineClosedError": "errors",
    "EngineOverloadedError": "errors",
    "EngineStats": "values.stats",
    "Entity": "values.outputs",
    "FingerprintMismatchError": "errors",
    "IndexCorruptedError": "errors",
    "IndexLockedError": "errors",
    "InputTooLongError": "errors",
    "InvalidDimensionsError": "errors",
    "InvalidRequestError": "errors",
    "LLM": "vllm.llm",
    "LabelScore": "values.outputs",
    "MillpondError": "errors",
    "MissingExtraError": "errors",
    "ModelLoadError": "errors",
    "ModelSpec": "values.spec",
    "Pair": "values.inputs",
    "PoolingParams": "values.params",
    "Ragged": "vectors.ragged",
    "RerankOutput": "values.outputs",
    "RerankResult": "values.outputs",
    "RewardOutput": "values.outputs",
    "ScoreOutput": "values.outputs",
    "SinkError": "errors",
    "SourceNotFoundError": "errors",
    "SpannedText": "values.inputs",
    "SparseEmbeddingOutput": "values.outputs",
    "Timings": "values.stats",
    "TokenClassificationOutput": "values.outputs",
    "TokenEmbeddingOutput": "values.outputs",
    "TokenIds": "values.inputs",
    "TokenSpans": "values.outputs",
    "UnknownModelError": "errors",
    "UnsupportedArchitectureError": "errors",
    "UnsupportedTaskError": "errors",
    "Usage": "values.outputs",
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
