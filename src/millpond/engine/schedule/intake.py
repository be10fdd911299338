"""Intake: a call's items looked up in the cache, tokenized and queued, a bounded number at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from itertools import islice
from time import perf_counter

import numpy as np

from millpond.cache import VectorCache
from millpond.engine.input.encode import InputEncoder
from millpond.engine.input.large_texts import is_large
from millpond.engine.input.tokenized import Tokenized
from millpond.engine.schedule.cache_errors import CacheErrors
from millpond.engine.schedule.call import Call
from millpond.engine.schedule.prefixes import shared_prefixes
from millpond.engine.schedule.request import Prefix, Request
from millpond.engine.schedule.scheduler import Scheduler
from millpond.inputs import key_of, size_of
from millpond.sqlitefile import CacheFileError

# Items of a call that are tokenized at a time. More sort better by length; fewer start sooner.
_STRETCH = 1024
# A call with fewer queued requests than this gets its next stretch.
_LOW_WATER = 512
# A call of at most this many texts is tokenized in the thread that made it: handing it over would take longer.
INLINE_TEXTS = 16


class Intake:
    """Feeds the scheduler; keeps no more of a call in tokenized form than the next batches need."""

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        encoder: InputEncoder,
        threads: Executor,
        large_thread: Executor,
        cache: VectorCache | None,
        namespace: Callable[[Call], str],
    ) -> None:
        self._scheduler = scheduler
        self._encoder = encoder
        self._threads = threads
        self._large_thread = large_thread
        self._cache = cache
        self._namespace = namespace
        self._errors = CacheErrors("vectors cannot be read from the cache, and are computed", logging.WARNING)
        # Slots that are not tokenized yet, the next stretch last; a call whose stretch is being tokenized is absent.
        self._backlogs: dict[Call, list[int]] = {}
        self._lock = threading.Lock()

    def admit(self, call: Call, *, inline: bool, caches: bool, crowded: bool) -> None:
        """Start a call, with a look-up in the cache first if it ``caches``.

        If many calls are running (``crowded``), a small one is tokenized by the worker that picks it. Otherwise this
        thread tokenizes it if it is ``inline``, since it will assist, else one of ``threads`` does. Large texts have a
        thread of their own, so that none of these waits for them.
        """
        small = 0 < len(call.items) <= INLINE_TEXTS and not any(map(is_large, call.items))
        if crowded and not caches and small:
            self._scheduler.defer(call)
        elif inline:
            self._begin(call, caches, inline=True)
        else:
            self._threads.submit(self._begin, call, caches)

    def prepare(self, calls: Sequence[Call]) -> None:
        """Tokenize deferred calls, those of one plan together, and queue them."""
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
                self._scheduler.put_all(zip(group, requests_of, strict=True))

    def _tokenize_group(self, calls: Sequence[Call]) -> list[list[Request]]:
        """Each call's requests; all calls have the same plan."""
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
        """Tokenize a call's next stretch if few of its requests are queued."""
        if queued >= _LOW_WATER or not self._backlogs:  # a call's backlog is here before its requests are queued
            return
        with self._lock:
            backlog = self._backlogs.pop(call, None)
        if backlog:
            self._thread_for(call, backlog).submit(self._feed, call, backlog)

    def _thread_for(self, call: Call, slots: Sequence[int]) -> Executor:
        """Which threads tokenize ``slots``, the longest item last."""
        return self._large_thread if slots and is_large(call.items[slots[-1]]) else self._threads

    def _begin(self, call: Call, caches: bool, inline: bool = False) -> None:
        if call.done:  # cancelled while it waited for this thread
            return
        try:
            if not call.items:
                return call.finish()
            slots = self._look_up(call) if caches else list(range(len(call.items)))
            # Characters stand in for tokens, so that stretches are nearly sorted. The longest texts come last in the
            # list: they are popped first, and the last batches are the cheap ones.
            slots.sort(key=lambda slot: size_of(call.items[slot]))
            # An item that is too long must refuse the call before any of it is queued.
            tokenize = self._put if call.plan.truncate == "error" else self._feed
            if inline or self._thread_for(call, slots) is self._threads:
                tokenize(call, slots, quiet=inline)
            else:
                self._large_thread.submit(tokenize, call, slots)
        except Exception as error:  # concerns this caller alone
            call.fail(error)

    def _look_up(self, call: Call) -> list[int]:
        """Deliver the rows that are in the cache; returns the slots of the others."""
        assert self._cache is not None
        keys = self._cache.keys(self._namespace(call), [key_of(item) for item in call.items])
        missing: list[int] = []
        for start in range(0, len(keys), _STRETCH * 8):
            if call.done:
                break
            part = keys[start : start + _STRETCH * 8]
            try:
                # Nobody else writes these rows before they are known to be missing.
                rows = call.rows[start : start + len(part)]
                hits = self._cache.get(part, width=call.native_width, out=rows)
            except CacheFileError as error:  # the texts are computed instead
                self._errors.report(error)
                missing.extend(range(start, start + len(part)))
                call.misses = len(missing)
                continue
            found = np.flatnonzero(hits.found)
            missing.extend((np.flatnonzero(~hits.found) + start).tolist())
            end = start + len(part)
            call.tokens[start:end] = hits.tokens
            call.truncated[start:end] = hits.truncated
            call.cached[start:end] = hits.found
            call.hits += len(found)
            call.misses = len(missing)
            if len(found):
                call.deliver_cached(len(found))
        return missing

    def _feed(self, call: Call, backlog: list[int], quiet: bool = False) -> None:
        """Queue the next stretch, and remember the rest."""
        if call.done or not backlog:
            return
        try:
            stretch = backlog[-_STRETCH:]
            del backlog[-_STRETCH:]
            requests = self._tokenize(call, stretch)
        except Exception as error:  # concerns this caller alone
            return call.fail(error)
        if backlog:
            with self._lock:
                self._backlogs[call] = backlog
                if call.done:  # cancelled meanwhile; drop() came before there was a backlog to drop
                    del self._backlogs[call]
        self._scheduler.put(call, requests, quiet=quiet)

    def _put(self, call: Call, slots: Sequence[int], quiet: bool = False) -> None:
        """Tokenize all of a call, then queue it."""
        requests: list[Request] = []
        try:
            for start in range(0, len(slots), _STRETCH):
                if call.done:
                    return
                requests += self._tokenize(call, slots[start : start + _STRETCH])
        except Exception as error:  # concerns this caller alone
            return call.fail(error)
        if requests:
            self._scheduler.put(call, requests, quiet=quiet)

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
            _request(call, slot, item, prefixes.get(i))
            for i, (slot, item) in enumerate(zip(slots, tokenized, strict=True))
        ]
        requests.sort(key=lambda request: -len(request.ids))
        return requests

    def drop(self, call: Call) -> None:
        """Forget the slots of a call that is over."""
        with self._lock:
            self._backlogs.pop(call, None)


def _request(call: Call, slot: int, item: Tokenized, prefix: Prefix | None) -> Request:
    return Request(
        call=call,
        slot=slot,
        ids=item.ids,
        types=item.types,
        attended=item.attended,
        kept=item.kept,
        prefix=prefix,
    )
