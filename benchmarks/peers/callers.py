"""Client processes of the soak test: they send requests, check every response and count the results.

Each process has asyncio clients and thread clients. Some disconnect before their response arrives, and from time to
time a burst of requests exceeds the server's queue.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
import numpy as np
import numpy.typing as npt

VECTORS, RANKS = "vectors", "ranks"  # served model names
HEADERS = {"Content-Type": "application/json"}
BUSY = 429
KEPT = 20  # complaints
# Kinds of requests, with their relative frequency.
KINDS = {"single": 30, "texts": 22, "rerank": 14, "score": 6, "classify": 10, "tokenize": 3, "mistake": 8, "leave": 7}
BURST_EVERY = 8.0  # seconds, at most
BURST = 40  # requests
TEXTS = 32  # texts per request of a burst


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Texts with the engine's own results for them.

    Attributes:
        texts: ``n`` texts.
        queries: ``q`` queries.
        vectors: ``[n, d]``.
        scores: ``[q, n]``.
        classes: ``[n, c]``.
    """

    texts: Sequence[str]
    queries: Sequence[str]
    vectors: npt.NDArray[np.float32]
    scores: npt.NDArray[np.float32]
    classes: npt.NDArray[np.float32]

    def save(self, folder: Path) -> None:
        """Write it into ``folder``."""
        inputs = json.dumps({"texts": list(self.texts), "queries": list(self.queries)})
        (folder / "texts.json").write_text(inputs, encoding="utf-8")
        np.savez(folder / "reference.npz", vectors=self.vectors, scores=self.scores, classes=self.classes)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read what :meth:`save` wrote."""
        inputs = json.loads((folder / "texts.json").read_text(encoding="utf-8"))
        with np.load(folder / "reference.npz") as arrays:
            return cls(**inputs, **{name: arrays[name] for name in arrays.files})


@dataclass(kw_only=True)
class Tally:
    """Counts and response times of one or more clients.

    Attributes:
        answers: Responses by path and status, such as ``"/score 200"``.
        left: Requests by path whose client disconnected early.
        again: Requests by path that were resent because the server had closed their connection.
        items: Texts and pairs in successful responses, each compared with the reference.
        seconds: Durations of the successful requests.
        complaints: Descriptions of the first ``KEPT`` problems.
        wrong: Number of problems.
    """

    answers: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    again: Counter[str] = field(default_factory=Counter)
    items: int = 0
    seconds: list[float] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    wrong: int = 0

    def complain(self, problem: str) -> None:
        """Record a problem."""
        self.wrong += 1
        if len(self.complaints) < KEPT:
            self.complaints.append(problem[:500])

    def add(self, other: Tally) -> None:
        """Add the counts of ``other`` to these."""
        for own, others in ((self.answers, other.answers), (self.left, other.left), (self.again, other.again)):
            own.update(others)
        self.items += other.items
        self.seconds += other.seconds
        self.complaints += other.complaints
        self.wrong += other.wrong


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request with its expected response.

    Attributes:
        path: Its URL path.
        body: Its body.
        status: Expected status; 429 is accepted too.
        items: Number of texts or pairs in the response.
        check: Describes the problem of a response's JSON; ``None`` if there is no problem.
    """

    path: str
    body: bytes
    status: int = 200
    items: int = 0
    check: Callable[[Any], str | None] = lambda _: None

    def judge(self, status: int, headers: Mapping[str, str], content: bytes, tally: Tally, seconds: float) -> None:
        """Check a response and count it in ``tally``."""
        tally.answers[f"{self.path} {status}"] += 1
        if status == BUSY:
            if int(headers.get("retry-after", "0")) < 1:
                tally.complain(f"{self.path}: 429 without Retry-After")
        elif status != self.status:
            tally.complain(f"{self.path}: status {status}, expected {self.status}: {content[:300]!r}")
        elif status == 200:
            tally.items += self.items
            tally.seconds.append(seconds)
            problem = self.check(json.loads(content))
            if problem is not None:
                tally.complain(f"{self.path}: {problem}")
        elif json.loads(content)["error"]["code"] != status:
            tally.complain(f"{self.path}: {content[:300]!r}")


class RequestFactory:
    """Creates random requests from the texts of a reference."""

    def __init__(self, reference: Reference, chance: random.Random) -> None:
        self._reference = reference
        self._chance = chance

    def next(self, kind: str) -> Request:
        """A request of the given kind, a key of ``KINDS``."""
        request: Request = getattr(self, f"_{kind}")()
        return request

    def texts(self, count: int) -> Request:
        """An embedding request with ``count`` texts."""
        rows = self._rows(count)
        encoding = self._chance.choice(("float", "base64"))
        expected = self._reference.vectors[rows]

        def check(answer: Any) -> str | None:
            vectors = [each["embedding"] for each in answer["data"]]
            if encoding == "base64":
                vectors = [np.frombuffer(base64.b64decode(each), dtype="<f4") for each in vectors]
            return _difference(vectors, expected, atol=1e-4)

        body = {"model": VECTORS, "input": self._of(rows), "encoding_format": encoding}
        return Request(path="/v1/embeddings", body=_json(body), items=count, check=check)

    def _single(self) -> Request:
        return self.texts(1)

    def _texts(self) -> Request:
        return self.texts(self._chance.randint(2, 12))

    _leave = _texts

    def _rerank(self) -> Request:
        query, rows = self._chance.randrange(len(self._reference.queries)), self._rows(self._chance.randint(2, 20))
        expected = self._reference.scores[query, rows]

        def check(answer: Any) -> str | None:
            indices = [each["index"] for each in answer["results"]]
            if sorted(indices) != list(range(len(rows))):
                return f"indices {indices} of {len(rows)}"
            return _difference([each["relevance_score"] for each in answer["results"]], expected[indices], atol=1e-3)

        body = {"model": RANKS, "query": self._reference.queries[query], "documents": self._of(rows)}
        path = self._chance.choice(("/rerank", "/v1/rerank", "/v2/rerank"))
        return Request(path=path, body=_json({**body, "truncate_prompt_tokens": -1}), items=len(rows), check=check)

    def _score(self) -> Request:
        query, rows = self._chance.randrange(len(self._reference.queries)), self._rows(self._chance.randint(1, 8))
        expected = self._reference.scores[query, rows]
        body = {"model": RANKS, "text_1": self._reference.queries[query], "text_2": self._of(rows)}
        return Request(
            path="/score",
            body=_json({**body, "truncate_prompt_tokens": -1}),
            items=len(rows),
            check=lambda answer: _difference([each["score"] for each in answer["data"]], expected, atol=1e-3),
        )

    def _classify(self) -> Request:
        rows = self._rows(self._chance.randint(1, 16))
        expected = self._reference.classes[rows]
        return Request(
            path="/classify",
            body=_json({"model": RANKS, "input": self._of(rows)}),
            items=len(rows),
            check=lambda answer: _difference([each["probs"] for each in answer["data"]], expected, atol=1e-3),
        )

    def _tokenize(self) -> Request:
        (row,) = self._rows(1)
        return Request(path="/tokenize", body=_json({"model": VECTORS, "prompt": self._reference.texts[row]}))

    def _mistake(self) -> Request:
        text = self._reference.texts[self._chance.randrange(len(self._reference.texts))]
        path, body, status = self._chance.choice(
            (
                ("/v1/embeddings", b'{"model": "vectors", "input": ["a', 400),
                ("/v1/embeddings", _json({"model": VECTORS, "input": []}), 400),
                ("/v1/embeddings", _json({"model": VECTORS, "input": [text, "water " * 2000]}), 400),
                ("/v1/embeddings", _json({"model": VECTORS, "input": text, "dimensions": 5}), 400),
                ("/v1/embeddings", _json({"model": "nobody", "input": text}), 404),
                ("/rerank", _json({"model": RANKS, "query": text}), 400),
                ("/classify", _json({"model": VECTORS, "input": text}), 501),
                ("/nowhere", b"{}", 404),
            )
        )
        return Request(path=path, body=body, status=status)

    def _rows(self, count: int) -> list[int]:
        return [self._chance.randrange(len(self._reference.texts)) for _ in range(count)]

    def _of(self, rows: Sequence[int]) -> list[str]:
        return [self._reference.texts[row] for row in rows]


def run_clients(url: str, folder: str, seed: int, seconds: float, clients: int, threads: int, tally_queue: Any) -> None:
    """Run ``clients`` asyncio clients and ``threads`` thread clients for ``seconds``; queue their tally."""
    reference, end = Reference.load(Path(folder)), time.monotonic() + seconds
    tallies = [Tally() for _ in range(threads + 1)]
    client_threads = [
        threading.Thread(
            target=_in_thread, args=(url, RequestFactory(reference, random.Random(f"{seed} {i}")), end, tallies[i])
        )
        for i in range(threads)
    ]
    for each in client_threads:
        each.start()
    asyncio.run(_with_asyncio(url, reference, seed, end, clients, tallies[-1]))
    for each in client_threads:
        each.join()
    total = Tally()
    for tally in tallies:
        total.add(tally)
    tally_queue.put(total)


def _in_thread(url: str, requests: RequestFactory, end: float, tally: Tally) -> None:
    chance = random.Random(id(tally))
    split = urlsplit(url)
    connection = http.client.HTTPConnection(str(split.hostname), split.port)

    def send(request: Request) -> None:
        began = time.perf_counter()
        connection.request("POST", request.path, request.body, HEADERS)
        answer = connection.getresponse()
        content = answer.read()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        request.judge(answer.status, headers, content, tally, time.perf_counter() - began)

    while time.monotonic() < end:
        request = requests.next(_kind(chance, leaving=False))
        try:
            send(request)
        except (http.client.HTTPException, OSError):  # the server closed an idle connection
            connection.close()
            tally.again[request.path] += 1
            try:
                send(request)
            except (http.client.HTTPException, OSError) as error:
                connection.close()
                tally.complain(f"{request.path}: no answer ({error!r})")
    connection.close()


async def _with_asyncio(url: str, reference: Reference, seed: int, end: float, clients: int, tally: Tally) -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False) as http_client:

        async def send(request: Request) -> None:
            began = time.perf_counter()
            try:
                answer = await http_client.post(request.path, content=request.body, headers=HEADERS)
            except httpx.TransportError:
                tally.again[request.path] += 1
                try:
                    answer = await http_client.post(request.path, content=request.body, headers=HEADERS)
                except httpx.TransportError as error:
                    return tally.complain(f"{request.path}: no answer ({error!r})")
            request.judge(answer.status_code, answer.headers, answer.content, tally, time.perf_counter() - began)

        async def one(chance: random.Random) -> None:
            requests = RequestFactory(reference, chance)
            while time.monotonic() < end:
                kind = _kind(chance)
                if kind == "leave":
                    await _leave(url, requests.next(kind), chance, tally)
                else:
                    await send(requests.next(kind))

        async def bursts(chance: random.Random) -> None:
            requests = RequestFactory(reference, chance)
            while (left := end - time.monotonic()) > 0:
                await asyncio.sleep(min(left, chance.uniform(0, BURST_EVERY)))
                await asyncio.gather(*(send(requests.texts(TEXTS)) for _ in range(BURST)))

        chances = [random.Random(f"{seed} async {i}") for i in range(clients + 1)]
        await asyncio.gather(bursts(chances[0]), *(one(chance) for chance in chances[1:]))


async def _leave(url: str, request: Request, chance: random.Random, tally: Tally) -> None:
    """Send a request, sometimes only a part of it, and disconnect without waiting for the response."""
    split = urlsplit(url)
    head = f"POST {request.path} HTTP/1.1\r\nHost: pond\r\nContent-Type: application/json\r\n"
    message = f"{head}Content-Length: {len(request.body)}\r\n\r\n".encode() + request.body
    if chance.random() < 0.3:
        message = message[: len(message) - chance.randint(1, len(request.body))]
    tally.left[request.path] += 1
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection(split.hostname, split.port)
        writer.write(message)
        await writer.drain()
        await asyncio.sleep(chance.uniform(0, 0.05))
        writer.close()
        await writer.wait_closed()


def _kind(chance: random.Random, *, leaving: bool = True) -> str:
    (kind,) = chance.choices(list(KINDS), list(KINDS.values()))
    return kind if leaving or kind != "leave" else "single"


def _difference(values: Any, expected: npt.NDArray[np.float32], *, atol: float) -> str | None:
    rows = np.asarray(values, dtype=np.float32)
    if rows.shape != expected.shape:
        return f"shape {rows.shape}, expected {expected.shape}"
    if not np.allclose(rows, expected, rtol=1e-3, atol=atol):
        return f"values differ by up to {float(np.abs(rows - expected).max()):.2g}"
    return None


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
