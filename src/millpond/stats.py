"""What an engine tells about its work: where a call's time went, what ran, and how much is waiting."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where the time of one call went, in seconds; of a score of two texts apart, of both its parts.

    ``queue + inference`` is at most ``total``. Tokenization comes before the queue, save for a call of more than a
    thousand texts, which is tokenized a stretch at a time while batches run.

    Attributes:
        tokenization: Turning its texts into token ids. Calls that were tokenized together have the whole of that time
            each: all of them waited for it.
        queue: From admission to its first batch, without the tokenization in between. 0 where nothing was run,
            because a cache had it all.
        inference: While at least one batch with texts of this call was under way. On a GPU a batch is under way from
            when it is sent, so the end of the one before may be in it: nobody stops the device to look at its clock.
        total: From admission to the result.
    """

    tokenization: float
    queue: float
    inference: float
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRun:
    """One batch that was run.

    Attributes:
        texts: Distinct texts in it.
        tokens: Their tokens.
        seconds: How long it took. On a GPU, where batches are sent before their turn comes, from the end of the one
            before, if that is later than when it was sent.
    """

    texts: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """An engine's counters at one moment; all but the first three only ever grow.

    What is admitted is under way until it is done, failed or cancelled. Each of the numbers is right by itself; they
    are not taken at one instant.

    Attributes:
        waiting_texts: Texts of calls that are under way: what ``max_queue`` bounds.
        running_calls: Calls under way.
        running_batches: Batches under way.
        calls_done: Calls that have their result.
        calls_failed: Calls that ended with an error after they were admitted.
        calls_cancelled: Calls that were cancelled.
        calls_rejected: Calls that were refused because too many texts were waiting.
        texts_done: Texts of the calls that have their result; duplicates and cached texts count.
        batches: Batches run.
        batch_texts: Distinct texts in those; cached ones were in none.
        batch_tokens: Tokens in those.
        batch_seconds: Seconds that those took, one by one; batches side by side count each.
        cache_hits: Distinct texts that the cache had.
        cache_misses: Distinct texts that it was asked for and had not.
    """

    waiting_texts: int
    running_calls: int
    running_batches: int
    calls_done: int
    calls_failed: int
    calls_cancelled: int
    calls_rejected: int
    texts_done: int
    batches: int
    batch_texts: int
    batch_tokens: int
    batch_seconds: float
    cache_hits: int
    cache_misses: int
