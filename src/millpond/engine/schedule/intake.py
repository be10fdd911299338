"""Intake: a call's items looked up in the cache, tokenized and queued, a bounded number at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from millpond.cache.errors import CacheFileError
from millpond.engine.input.encode import InputEncoder
from millpond.engine.schedule.backlog import Backlog, TokenizeChunk
from millpond.engine.schedule.call import Call
from millpond.engine.schedule.committer import CacheErrors
from millpond.engine.schedule.request import Request, shared_prefixes
from millpond.engine.schedule.scheduler import Scheduler
from millpond.engine.tokenize.large_texts import is_large
from millpond.engine.tokenize.tokenized import Tokenized
from millpond.values.inputs import key_of, size_of

if TYPE_CHECKING:
    from millpond.cache.vector_cache import VectorCache

# Items that are looked up in the cache at a time.
_LOOKED_UP = 8192
# Items that the tokenizer gets at a time.
_TOKENIZED = 2048
# A call of at most this many texts is tokenized in the thread that made it: handing it over would take longer.
INLINE_TEXTS = 16


class Intake:
    """Feeds the scheduler; keeps no more of a call in tokenized form than the next batches need.

    A call is tokenized chunk by chunk, by several threads at once if its texts do not last for the next batches.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        encoder: InputEncoder,
        threads: Executor,  # where texts are tokenized
        feeders: int,  # number of these threads
        large_thread: Executor,  # where large texts are
        cache: VectorCache | None,  # vectors are read from it
        namespace: Callable[[Call], str],  # names what decides a call's vectors besides its texts
        batch_tokens: int,  # most tokens of a batch, on all devices and cores together
    ) -> None:
        self._scheduler = scheduler
        self._encoder = encoder
        self._threads = threads
        self._feeders = feeders
        self._large_thread = large_thread
        self._cache = cache
        self._namespace = namespace
        self._batch_tokens = batch_tokens
        self._errors = CacheErrors("vectors cannot be read from the cache, and are computed", logging.WARNING)
        self._backlogs: dict[Call, Backlog] = {}  # of the calls that are not queued at once

    def admit(self, call: Call, *, inline: bool, caches: bool, crowded: bool, whole: bool = False) -> None:
        """Start a call, with a look-up in the cache first if it ``caches``.

        If many calls are running (``crowded``), a small one is tokenized by the worker that picks it. Otherwise this
        thread tokenizes it if it is ``inline``, since it runs batches then; else one of ``threads`` does. Large texts
        have a thread of their own, so that none of these waits for them. A thread that is one of these itself, in a
        future's callback, tokenizes the ``whole`` call: nobody else may be there to do it.
        """
        small = 0 < len(call.items) <= INLINE_TEXTS and not any(map(is_large, call.items))
        if crowded and not caches and small:
            self._scheduler.defer(call)
        elif inline:
            self._begin(call, caches, inline=True, whole=whole)
        else:
            self._threads.submit(self._begin, call, caches)

    def prepare(self, calls: Sequence[Call]) -> None:
        """Tokenize deferred calls, each plan's together, and queue them."""
        groups: dict[int, list[Call]] = {}
        for call in calls:
            if not call.done:
                groups.setdefault(id(call.plan), []).append(call)
        for group in groups.values():
            try:
                requests_of = self._tokenize_group(group)
            except Exception:  # each call by itself, so that only the one at fault fails
                for call in group:
                    self._begin(call, caches=False)
            else:
                self._scheduler.put_all(list(zip(group, requests_of, strict=True)))

    def _tokenize_group(self, calls: Sequence[Call]) -> list[list[Request]]:
        begun = perf_counter()
        items = [item for call in calls for item in call.items]
        tokenized = iter(self._encoder.encode(items, calls[0].plan, index_of=lambda i: i))
        seconds = perf_counter() - begun
        for call in calls:
            call.timer.tokenized(seconds)
        return [
            self._requests(call, range(len(call.items)), list(islice(tokenized, len(call.items)))) for call in calls
        ]

    def refill(self, call: Call, queued: int) -> None:
        """Tokenize more of a call if few of its requests are queued."""
        backlog = self._backlogs.get(call)  # it is there before the call's requests are queued
        while backlog is not None and (chunk := backlog.take(queued)) is not None:
            self._thread_for(call, chunk.slots).submit(self._feed_chunk, call, backlog, chunk)

    def _thread_for(self, call: Call, slots: Sequence[int]) -> Executor:
        """Which threads tokenize ``slots``, the longest item last."""
        return self._large_thread if slots and is_large(call.items[slots[-1]]) else self._threads

    def _begin(self, call: Call, caches: bool, inline: bool = False, whole: bool = False) -> None:
        if call.done:  # cancelled while it waited for this thread
            return
        try:
            if not call.items:
                return call.finish()
            slots = self._look_up(call) if caches else range(len(call.items))
            # An item that is too long must refuse the call before any of it is queued.
            if whole or len(slots) <= INLINE_TEXTS or call.plan.truncate == "error":
                ordered = sorted(slots, key=lambda slot: size_of(call.items[slot]))
                if inline or self._thread_for(call, ordered) is self._threads:
                    self._put(call, ordered, quiet=inline)
                else:
                    self._large_thread.submit(self._put, call, ordered)
            else:
                self._feed(call, slots, inline=inline)
        except Exception as error:  # concerns this caller alone
            call.fail(error)

    def _look_up(self, call: Call) -> list[int]:
        """Deliver the rows that are in the cache; returns the slots of the others."""
        assert self._cache is not None
        keys = self._cache.keys(self._namespace(call), [key_of(item) for item in call.items])
        missing: list[int] = []
        for start in range(0, len(keys), _LOOKED_UP):
            if call.done:
                break
            part = keys[start : start + _LOOKED_UP]
            try:
                # Nobody else writes these rows before they are known to be missing.
                rows = call.result.rows[start : start + len(part)]
                hits = self._cache.get(part, width=call.native_width, out=rows)
            except CacheFileError as error:  # the texts are computed instead
                self._errors.report(error)
                missing.extend(range(start, start + len(part)))
                call.misses = len(missing)
                continue
            found = np.flatnonzero(hits.found)
            missing.extend((np.flatnonzero(~hits.found) + start).tolist())
            end = start + len(part)
            call.result.tokens[start:end] = hits.tokens
            call.result.truncated[start:end] = hits.truncated
            call.result.cached[start:end] = hits.found
            call.hits += len(found)
            call.misses = len(missing)
            if len(found):
                call.deliver_cached(len(found))
        return missing

    def _feed(self, call: Call, slots: Sequence[int], *, inline: bool) -> None:
        """Tokenize a call's first chunk, or let a thread do so, and leave the rest to :meth:`refill`."""
        backlog = Backlog(
            call.items, slots, limit=call.plan.limit, batch_tokens=self._batch_tokens, feeders=self._feeders
        )
        self._backlogs[call] = backlog
        call.continues = True
        if call.done:  # cancelled meanwhile; drop() came before there was a backlog to drop
            return self.drop(call)
        chunk = backlog.take(0)
        assert chunk is not None
        self.refill(call, 0)
        if inline or self._thread_for(call, chunk.slots) is self._threads:
            self._feed_chunk(call, backlog, chunk, quiet=inline)
        else:
            self._large_thread.submit(self._feed_chunk, call, backlog, chunk)

    def _feed_chunk(self, call: Call, backlog: Backlog, chunk: TokenizeChunk, quiet: bool = False) -> None:
        """Tokenize and queue a chunk, and have the next one tokenized if that is not enough."""
        tokens = self._put(call, chunk.slots, quiet)
        if call.done:
            return
        try:
            backlog.done(chunk, tokens)
            if backlog.finished:
                call.continues = False
                return self.drop(call)
            self.refill(call, self._scheduler.queued(call))
        except Exception as error:  # concerns this caller alone
            call.fail(error)

    def _put(self, call: Call, slots: Sequence[int], quiet: bool = False) -> int:
        """Tokenize ``slots``, the longest item last, then queue all of them; returns the number of their tokens."""
        requests: list[Request] = []
        try:
            for end in range(len(slots), 0, -_TOKENIZED):
                if call.done:
                    return 0
                requests += self._tokenize(call, slots[max(0, end - _TOKENIZED) : end])
            if requests:
                self._scheduler.put(call, requests, quiet=quiet)
        except Exception as error:  # concerns this caller alone
            call.fail(error)
        return sum([len(request.ids) for request in requests])

    def _tokenize(self, call: Call, slots: Sequence[int]) -> list[Request]:
        """Requests for ``slots``, longest first."""
        begun = perf_counter()
        items = [call.items[slot] for slot in slots]
        tokenized = self._encoder.encode(items, call.plan, index_of=lambda i: call.index_of(slots[i]))
        call.timer.tokenized(perf_counter() - begun)
        return self._requests(call, slots, tokenized)

    @staticmethod
    def _requests(call: Call, slots: Sequence[int], tokenized: Sequence[Tokenized]) -> list[Request]:
        prefixes = shared_prefixes([call.items[slot] for slot in slots], tokenized) if call.plan.shares else {}
        call.note(slots, tokenized)
        requests = [
            Request(call, slot, item.ids, item.types, item.attended, item.kept, prefixes.get(i) if prefixes else None)
            for i, (slot, item) in enumerate(zip(slots, tokenized, strict=True))
        ]
        requests.sort(key=lambda request: -len(request.ids))
        return requests

    def drop(self, call: Call) -> None:
        """Forget what is left of a call that is over, or queued."""
        self._backlogs.pop(call, None)
