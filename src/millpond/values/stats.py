"""Statistics of an engine: the times of a call, the batches that ran, and the counters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where the time of one call went, in seconds; for a score from two calls, of both together.

    ``queue + inference`` is at most ``total``. Tokenization comes before the queue, except in a call of many texts,
    which is tokenized in parts while batches run, by several threads whose times are added up.

    Attributes:
        tokenization: Time to tokenize its texts. Calls that were tokenized together have the whole time each: all of
            them waited for it.
        queue: From admission to its first batch, without the tokenization in between. 0 if no batch was run because
            everything was in the cache.
        inference: Time in which at least one batch with texts of this call was running. On a GPU a batch counts from
            its launch, so the end of the batch before may be included: the device is not stopped to read its clock.
        total: From admission to the result.
    """

    tokenization: float
    queue: float
    inference: float
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRun:
    """One batch that ran.

    Attributes:
        texts: Distinct texts in it.
        tokens: Tokens of these texts.
        seconds: Duration. On a GPU, where a batch is launched before the one before has ended, from the later of the
            two moments.
    """

    texts: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """An engine's counters at one moment; all but the first three only grow.

    A call is running from its admission until it is done, failed or cancelled. Each number is right by itself; they
    are not read at one instant.

    Attributes:
        waiting_texts: Texts of running calls, which ``max_queue`` limits.
        running_calls: Running calls.
        running_batches: Running batches.
        calls_done: Calls that have their result.
        calls_failed: Calls that ended with an error after they were admitted.
        calls_cancelled: Calls that were cancelled.
        calls_rejected: Calls that were refused because too many texts were waiting.
        texts_done: Texts of the calls that have their result, duplicates and cached texts included.
        texts_truncated: Of these texts those that were cut; the engine warns of the first ones only.
        batches: Batches that ran.
        batch_texts: Distinct texts in these batches; cached texts are in none.
        batch_tokens: Tokens in these batches.
        batch_seconds: Sum of the durations of these batches; batches that ran side by side count each.
        cache_hits: Distinct texts found in the cache.
        cache_misses: Distinct texts looked up in the cache and not found.
    """

    waiting_texts: int
    running_calls: int
    running_batches: int
    calls_done: int
    calls_failed: int
    calls_cancelled: int
    calls_rejected: int
    texts_done: int
    texts_truncated: int
    batches: int
    batch_texts: int
    batch_tokens: int
    batch_seconds: float
    cache_hits: int
    cache_misses: int
