"""Drive: closed-loop and open-loop load."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from load_generator.connection import Answer, Connections
from load_generator.plan import LoadPlan
from load_generator.report import OK, LoadReport, Sample
from load_generator.target import APIS, Target, UnusableAnswerError, excerpt, tokens_of
from millpond.errors import InvalidRequestError
from millpond.support.progress import draw_bar

if TYPE_CHECKING:
    from tqdm import tqdm

_RECONNECT_SECONDS = 0.1  # pause of a client after a failed connection
_SLEEP_SECONDS = 0.1  # the last part of a wait is slept, which is precise; waiting for an event may end late
_REFRESH_SECONDS = 0.2  # between updates of the progress bar


def run(target: Target, plan: LoadPlan, texts: Sequence[str], *, show_progress: bool = False) -> LoadReport:
    """Put a server under load, and report the results.

    Before the load a single request is sent, and its answer is checked.

    Args:
        target: The endpoint; without a model name, the server's only model is used.
        plan: The load.
        texts: The texts of the requests, in order and repeated.
        show_progress: Whether to show a progress bar if standard error is a terminal, or in a notebook.

    Raises:
        UnusableAnswerError: The endpoint cannot be reached, refuses the first request, or returns an unusable answer.
        InvalidRequestError: No texts.
    """
    return asyncio.run(drive(target, plan, texts, show_progress=show_progress))


async def drive(target: Target, plan: LoadPlan, texts: Sequence[str], *, show_progress: bool = False) -> LoadReport:
    """:func:`run` for a caller with an event loop."""
    async with Connections(target, limit=plan.connections, timeout=plan.timeout) as connections:
        if target.model is None:
            target = replace(target, model=await _only_model(connections, target))
        messages = _messages(target, texts, plan.texts_per_request)
        await _probe(connections, target, messages[0], plan.texts_per_request)
        if plan.warm_up:
            warm = replace(plan, duration=plan.warm_up, requests=None)
            await _Phase(connections, messages, warm).run(bar=None)
        before = time.process_time()
        phase = _Phase(connections, messages, plan)
        bar = draw_bar(
            show=show_progress,
            total=plan.requests or plan.duration,
            unit="s" if plan.requests is None else "request",
            leave=False,
        )
        with bar:
            await phase.run(bar)
        return LoadReport(
            target=target,
            plan=plan,
            samples=phase.samples,
            messages=phase.errors,
            distinct=len(messages),
            cpu_seconds=time.process_time() - before,
        )


class _Phase:
    """The warm-up, or the measured load."""

    def __init__(self, connections: Connections, messages: Sequence[bytes], plan: LoadPlan) -> None:
        self._connections = connections
        self._messages = itertools.cycle(messages)
        self._plan = plan
        self._loop = asyncio.get_running_loop()
        self._start = 0.0
        self.samples: list[Sample] = []
        self.errors: dict[str, str] = {}

    async def run(self, bar: tqdm[Any] | None) -> None:
        drawing = None if bar is None or bar.disable else asyncio.create_task(self._draw(bar))
        self._start = self._loop.time()
        try:
            await (self._closed() if self._plan.rate is None else self._open())
        finally:
            if drawing is not None:
                drawing.cancel()

    async def _closed(self) -> None:
        numbers = itertools.count() if self._plan.requests is None else iter(range(self._plan.requests))
        end = float("inf") if self._plan.duration is None else self._plan.duration

        async def client() -> None:
            while self._now() < end and next(numbers, None) is not None:
                if await self._request(self._now()) == "connection":
                    await asyncio.sleep(_RECONNECT_SECONDS)

        await asyncio.gather(*(client() for _ in range(self._plan.connections)))

    async def _open(self) -> None:
        under_way: set[asyncio.Task[str]] = set()
        all_sent = asyncio.Event()

        def start(due: float) -> None:
            task = self._loop.create_task(self._request(due))
            under_way.add(task)
            task.add_done_callback(under_way.discard)

        clock = _ArrivalClock(self._loop, self._start, self._plan.arrivals(), start, all_sent.set)
        with clock:
            await all_sent.wait()
        while under_way:
            await asyncio.wait(under_way)

    async def _request(self, due: float) -> str:
        sent = self._now()
        tokens = 0
        try:
            answer = await self._connections.send(next(self._messages))
        except TimeoutError as error:
            status, message = "timeout", str(error) or "no connection within the timeout"
        except OSError as error:
            status, message = "connection", str(error) or type(error).__name__
        else:
            status, message = str(answer.status), ""
            if status == OK:
                tokens = tokens_of(answer.body) or 0
            elif status not in self.errors:
                message = excerpt(answer.body)
        if status != OK:
            self.errors.setdefault(status, message)
        self.samples.append(Sample(due, sent, self._now(), status, tokens))
        return status

    def _now(self) -> float:
        return self._loop.time() - self._start

    async def _draw(self, bar: tqdm[Any]) -> None:
        while True:
            timed = self._plan.duration
            bar.n = len(self.samples) if timed is None else min(round(self._now(), 1), timed)
            bar.set_postfix(failed=sum(sample.status != OK for sample in self.samples), refresh=False)
            bar.refresh()
            await asyncio.sleep(_REFRESH_SECONDS)


class _ArrivalClock:
    """A thread that starts each request when it is due.

    The event loop's own timers are up to a millisecond late, a third of the latency of a short text.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        start: float,
        arrivals: Iterator[float],
        start_request: Callable[[float], None],
        all_sent: Callable[[], None],
    ) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(loop, start, arrivals, start_request, all_sent), name="arrivals", daemon=True
        )

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(
        self,
        loop: asyncio.AbstractEventLoop,
        start: float,
        arrivals: Iterator[float],
        start_request: Callable[[float], None],
        all_sent: Callable[[], None],
    ) -> None:
        for due in arrivals:
            while (early := start + due - time.monotonic()) > 0:
                if early < _SLEEP_SECONDS:
                    time.sleep(early)
                elif self._stop.wait(early - _SLEEP_SECONDS / 2):
                    return
            loop.call_soon_threadsafe(start_request, due)
        loop.call_soon_threadsafe(all_sent)


def _messages(target: Target, texts: Sequence[str], size: int) -> list[bytes]:
    """All distinct requests that the texts make, encoded before the measurement."""
    if not texts:
        raise InvalidRequestError("there are no texts to send")
    cycled = itertools.cycle(texts)
    queries = itertools.cycle(texts) if APIS[target.api].needs_query else itertools.repeat("")
    return [
        target.message(next(queries), list(itertools.islice(cycled, size))) for _ in range(max(1, len(texts) // size))
    ]


async def _only_model(connections: Connections, target: Target) -> str | None:
    """The name of the server's only model; ``None`` if it has several or does not say."""
    try:
        cards = json.loads((await _send(connections, target, target.get("/v1/models"))).body)["data"]
        names = [str(card["id"]) for card in cards]
    except (ValueError, LookupError, TypeError):
        return None
    return names[0] if len(names) == 1 else None


async def _probe(connections: Connections, target: Target, message: bytes, texts: int) -> None:
    answer = await _send(connections, target, message)
    if str(answer.status) != OK:
        raise UnusableAnswerError(f"{target.endpoint} answers {answer.status}: {excerpt(answer.body)}")
    target.check(answer.body, texts)


async def _send(connections: Connections, target: Target, message: bytes) -> Answer:
    try:
        return await connections.send(message)
    except OSError as error:  # a TimeoutError is one
        raise UnusableAnswerError(f"{target.url} does not answer: {str(error) or type(error).__name__}") from error
