"""What the page at ``/`` asks for every second or so."""

from __future__ import annotations

from pydantic import BaseModel, Field


class CacheStats(BaseModel):
    """A model's vector cache."""

    hits: int = Field(description="Texts that it had.")
    misses: int = Field(description="Texts that it had not.")


class ModelStats(BaseModel):
    """A model at work; throughput is that of the last ten seconds."""

    name: str
    tasks: list[str]
    waiting_texts: int = Field(description="Texts of calls under way: what `max_queue` bounds.")
    running_calls: int
    tokens_per_second: float
    texts_per_second: float
    batches: int = Field(description="Batches since the start.")
    cache: CacheStats | None = Field(description="Left out of the work, where the model has no cache.")


class Stats(BaseModel):
    """The server at work."""

    models: list[ModelStats]
    requests_per_second: float = Field(description="POST requests, over the last ten seconds.")
    uptime_seconds: float
