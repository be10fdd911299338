"""Clients of a soaked server: what they ask, what they must hear, and what they heard. Processes of their own.

Each process has clients with asyncio and clients in threads, clients that leave before they are answered, and now and
then a burst of more than the server lets wait.
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

VECTORS, RANKS = "vectors", "ranks"  # what the server calls its models
HEADERS = {"Content-Type": "application/json"}
BUSY = 429
KEPT = 20  # complaints
# What a client does, and how often.
KINDS = {"single": 30, "texts": 22, "rerank": 14, "score": 6, "classify": 10, "tokenize": 3, "mistake": 8, "leave": 7}
BURST_EVERY = 8.0  # seconds, at most
BURST = 40  # requests
TEXTS = 32  # texts of each of these


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Texts, and what the engine makes of them.

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
        said = json.dumps({"texts": list(self.texts), "queries": list(self.queries)})
        (folder / "texts.json").write_text(said, encoding="utf-8")
        np.savez(folder / "reference.npz", vectors=self.vectors, scores=self.scores, classes=self.classes)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """What :meth:`save` wrote."""
        said = json.loads((folder / "texts.json").read_text(encoding="utf-8"))
        with np.load(folder / "reference.npz") as arrays:
            return cls(**said, **{name: arrays[name] for name in arrays.files})


@dataclass(kw_only=True)
class Tally:
    """What clients count.

    Attributes:
        answers: How often a path was answered with a status: ``"/score 200"``.
        left: Requests of a path whose client left.
        again: Requests of a path that were sent again, over another connection, since theirs was closed.
        items: Texts and pairs that were answered, each of them compared with the reference.
        seconds: How long the answers took that have something in them.
        complaints: What was wrong, the first of them.
        wrong: How much was.
    """

    answers: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    again: Counter[str] = field(default_factory=Counter)
    items: int = 0
    seconds: list[float] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    wrong: int = 0

    def complain(self, what: str) -> None:
        """Something is not as it should be."""
        self.wrong += 1
        if len(self.complaints) < KEPT:
            self.complaints.append(what[:500])

    def add(self, other: Tally) -> None:
        """Count what another counted."""
        for mine, theirs in ((self.answers, other.answers), (self.left, other.left), (self.again, other.again)):
            mine.update(theirs)
        self.items += other.items
        self.seconds += other.seconds
        self.complaints += other.complaints
        self.wrong += other.wrong


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request, and what its answer must be.

    Attributes:
        path: Where it goes.
        body: What is sent.
        status: What it is answered, unless the server has too much to do.
        items: How many texts or pairs the answer holds.
        check: What is wrong with an answer's JSON; nothing, if it is as it should be.
    """

    path: str
    body: bytes
    status: int = 200
    items: int = 0
    check: Callable[[Any], str | None] = lambda _: None

    def judge(self, status: int, headers: Mapping[str, str], content: bytes, tally: Tally, seconds: float) -> None:
        """Count an answer."""
        tally.answers[f"{self.path} {status}"] += 1
        if status == BUSY:
            if int(headers.get("retry-after", "0")) < 1:
                tally.complain(f"{self.path}: 429 without Retry-After")
        elif status != self.status:
            tally.complain(f"{self.path}: {status} for {self.status}: {content[:300]!r}")
        elif status == 200:
            tally.items += self.items
            tally.seconds.append(seconds)
            problem = self.check(json.loads(content))
            if problem is not None:
                tally.complain(f"{self.path}: {problem}")
        elif json.loads(content)["error"]["code"] != status:
            tally.complain(f"{self.path}: {content[:300]!r}")


class Asker:
    """Makes requests over the texts of a reference."""

    def __init__(self, reference: Reference, chance: random.Random) -> None:
        self._reference = reference
        self._chance = chance

    def next(self, kind: str) -> Ask:
        """A request of a kind of ``KINDS``."""
        made: Ask = getattr(self, f"_{kind}")()
        return made

    def texts(self, count: int) -> Ask:
        """So many texts to embed, of any length."""
        rows = self._rows(count)
        encoding = self._chance.choice(("float", "base64"))
        wanted = self._reference.vectors[rows]

        def check(answer: Any) -> str | None:
            found = [each["embedding"] for each in answer["data"]]
            if encoding == "base64":
                found = [np.frombuffer(base64.b64decode(each), dtype="<f4") for each in found]
            return _differs(found, wanted, atol=1e-4)

        body = {"model": VECTORS, "input": self._of(rows), "encoding_format": encoding}
        return Ask(path="/v1/embeddings", body=_json(body), items=count, check=check)

    def _single(self) -> Ask:
        return self.texts(1)

    def _texts(self) -> Ask:
        return self.texts(self._chance.randint(2, 12))

    _leave = _texts

    def _rerank(self) -> Ask:
        query, rows = self._chance.randrange(len(self._reference.queries)), self._rows(self._chance.randint(2, 20))
        wanted = self._reference.scores[query, rows]

        def check(answer: Any) -> str | None:
            places = [each["index"] for each in answer["results"]]
            if sorted(places) != list(range(len(rows))):
                return f"indices {places} of {len(rows)}"
            return _differs([each["relevance_score"] for each in answer["results"]], wanted[places], atol=1e-3)

        body = {"model": RANKS, "query": self._reference.queries[query], "documents": self._of(rows)}
        path = self._chance.choice(("/rerank", "/v1/rerank", "/v2/rerank"))
        return Ask(path=path, body=_json({**body, "truncate_prompt_tokens": -1}), items=len(rows), check=check)

    def _score(self) -> Ask:
        query, rows = self._chance.randrange(len(self._reference.queries)), self._rows(self._chance.randint(1, 8))
        wanted = self._reference.scores[query, rows]
        body = {"model": RANKS, "text_1": self._reference.queries[query], "text_2": self._of(rows)}
        return Ask(
            path="/score",
            body=_json({**body, "truncate_prompt_tokens": -1}),
            items=len(rows),
            check=lambda answer: _differs([each["score"] for each in answer["data"]], wanted, atol=1e-3),
        )

    def _classify(self) -> Ask:
        rows = self._rows(self._chance.randint(1, 16))
        wanted = self._reference.classes[rows]
        return Ask(
            path="/classify",
            body=_json({"model": RANKS, "input": self._of(rows)}),
            items=len(rows),
            check=lambda answer: _differs([each["probs"] for each in answer["data"]], wanted, atol=1e-3),
        )

    def _tokenize(self) -> Ask:
        (row,) = self._rows(1)
        return Ask(path="/tokenize", body=_json({"model": VECTORS, "prompt": self._reference.texts[row]}))

    def _mistake(self) -> Ask:
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
        return Ask(path=path, body=body, status=status)

    def _rows(self, count: int) -> list[int]:
        return [self._chance.randrange(len(self._reference.texts)) for _ in range(count)]

    def _of(self, rows: Sequence[int]) -> list[str]:
        return [self._reference.texts[row] for row in rows]


def work(url: str, folder: str, seed: int, seconds: float, clients: int, threads: int, told: Any) -> None:
    """Ask for ``seconds``, with so many clients of each sort, and put the tally into the queue ``told``."""
    reference, end = Reference.load(Path(folder)), time.monotonic() + seconds
    tallies = [Tally() for _ in range(threads + 1)]
    crew = [
        threading.Thread(target=_in_thread, args=(url, Asker(reference, random.Random(f"{seed} {i}")), end, tallies[i]))
        for i in range(threads)
    ]
    for each in crew:
        each.start()
    asyncio.run(_with_asyncio(url, reference, seed, end, clients, tallies[-1]))
    for each in crew:
        each.join()
    whole = Tally()
    for tally in tallies:
        whole.add(tally)
    told.put(whole)


def _in_thread(url: str, asker: Asker, end: float, tally: Tally) -> None:
    chance = random.Random(id(tally))
    split = urlsplit(url)
    connection = http.client.HTTPConnection(str(split.hostname), split.port)

    def send(ask: Ask) -> None:
        began = time.perf_counter()
        connection.request("POST", ask.path, ask.body, HEADERS)
        answer = connection.getresponse()
        content = answer.read()
        headers = {name.lower(): value for name, value in answer.getheaders()}
        ask.judge(answer.status, headers, content, tally, time.perf_counter() - began)

    while time.monotonic() < end:
        ask = asker.next(_kind(chance, leaving=False))
        try:
            send(ask)
        except (http.client.HTTPException, OSError):  # an idle connection that the server closed
            connection.close()
            tally.again[ask.path] += 1
            try:
                send(ask)
            except (http.client.HTTPException, OSError) as error:
                connection.close()
                tally.complain(f"{ask.path}: no answer ({error!r})")
    connection.close()


async def _with_asyncio(url: str, reference: Reference, seed: int, end: float, clients: int, tally: Tally) -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False) as http_client:

        async def send(ask: Ask) -> None:
            began = time.perf_counter()
            try:
                answer = await http_client.post(ask.path, content=ask.body, headers=HEADERS)
            except httpx.TransportError:
                tally.again[ask.path] += 1
                try:
                    answer = await http_client.post(ask.path, content=ask.body, headers=HEADERS)
                except httpx.TransportError as error:
                    return tally.complain(f"{ask.path}: no answer ({error!r})")
            ask.judge(answer.status_code, answer.headers, answer.content, tally, time.perf_counter() - began)

        async def one(chance: random.Random) -> None:
            asker = Asker(reference, chance)
            while time.monotonic() < end:
                kind = _kind(chance)
                if kind == "leave":
                    await _leave(url, asker.next(kind), chance, tally)
                else:
                    await send(asker.next(kind))

        async def bursts(chance: random.Random) -> None:
            asker = Asker(reference, chance)
            while (left := end - time.monotonic()) > 0:
                await asyncio.sleep(min(left, chance.uniform(0, BURST_EVERY)))
                await asyncio.gather(*(send(asker.texts(TEXTS)) for _ in range(BURST)))

        chances = [random.Random(f"{seed} async {i}") for i in range(clients + 1)]
        await asyncio.gather(bursts(chances[0]), *(one(chance) for chance in chances[1:]))


async def _leave(url: str, ask: Ask, chance: random.Random, tally: Tally) -> None:
    """Send a request, or half of it, and do not wait for the answer."""
    split = urlsplit(url)
    head = f"POST {ask.path} HTTP/1.1\r\nHost: pond\r\nContent-Type: application/json\r\n"
    message = f"{head}Content-Length: {len(ask.body)}\r\n\r\n".encode() + ask.body
    if chance.random() < 0.3:
        message = message[: len(message) - chance.randint(1, len(ask.body))]
    tally.left[ask.path] += 1
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


def _differs(found: Any, wanted: npt.NDArray[np.float32], *, atol: float) -> str | None:
    rows = np.asarray(found, dtype=np.float32)
    if rows.shape != wanted.shape:
        return f"shape {rows.shape}, which is to be {wanted.shape}"
    if not np.allclose(rows, wanted, rtol=1e-3, atol=atol):
        return f"values that differ by up to {float(np.abs(rows - wanted).max()):.2g}"
    return None


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
