"""The statistics that the page at ``/`` requests about once a second."""

from __future__ import annotations

from pydantic import BaseModel, Field


class CacheStats(BaseModel):
    """A model's vector cache."""

    hits: int = Field(description="Texts found in the cache.")
    misses: int = Field(description="Texts not found in the cache.")


class ModelStats(BaseModel):
    """The activity of a model; throughput is over the last ten seconds."""

    name: str
    tasks: list[str]
    waiting_texts: int = Field(description="Texts of calls in progress, bounded by `max_queue`.")
    running_calls: int
    tokens_per_second: float
    texts_per_second: float
    batches: int = Field(description="Batches since the start.")
    cache: CacheStats | None = Field(description="null if the model has no cache.")


class Stats(BaseModel):
    """The activity of the server."""

    models: list[ModelStats]
    requests_per_second: float = Field(description="POST requests, over the last ten seconds.")
    uptime_seconds: float
