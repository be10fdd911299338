"""Target: the endpoint under load, and the HTTP messages that it is sent."""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from millpond.errors import InvalidRequestError, MillpondError


class UnusableAnswerError(MillpondError):
    """The endpoint does not answer, or not with what was asked of it."""


@dataclass(frozen=True, kw_only=True)
class Api:
    """One shape of requests and answers.

    Attributes:
        path: Where servers have it.
        body: Makes a request's fields of (query, texts).
        rows: Key of the answer's list with a row for each text; None where the answer is that list.
        asks: Whether a request needs a query beside its texts.
    """

    path: str
    body: Callable[[str, Sequence[str]], dict[str, Any]]
    rows: str | None
    asks: bool = True


APIS: Mapping[str, Api] = {
    "embeddings": Api(path="/v1/embeddings", body=lambda query, texts: {"input": list(texts)}, rows="data", asks=False),
    "rerank": Api(path="/rerank", body=lambda query, texts: {"query": query, "documents": list(texts)}, rows="results"),
    "score": Api(path="/score", body=lambda query, texts: {"text_1": query, "text_2": list(texts)}, rows="data"),
    # The native routes of text-embeddings-inference; its OpenAI route is `embeddings`.
    "tei-embed": Api(path="/embed", body=lambda query, texts: {"inputs": list(texts)}, rows=None, asks=False),
    "tei-rerank": Api(path="/rerank", body=lambda query, texts: {"query": query, "texts": list(texts)}, rows=None),
}

# The last one of a body is the server's own: servers write it at the end, and quotes within texts are escaped.
_USAGE = re.compile(rb'"usage"\s*:\s*\{([^{}]*)')
_TOKENS = re.compile(rb'"(?:prompt_tokens|total_tokens)"\s*:\s*(\d+)')
_TAIL = 2048


@dataclass(frozen=True, kw_only=True)
class Target:
    """An endpoint under load.

    Attributes:
        url: ``http://host:port`` or ``https://...``, and a prefix of the paths if there is one.
        api: A key of ``APIS``.
        path: In the place of the API's own path.
        model: What the server calls the model; None leaves the field out.
        api_key: Sent as a bearer token.
        encoding_format: ``float`` or ``base64`` of the embeddings API; None leaves the field out.
        dimensions: Matryoshka width of the embeddings API; None leaves the field out.
        truncate_prompt_tokens: Where to cut longer texts, -1 for the model's own limit; None leaves the field out.
        ca_file: PEM file of the authorities that sign the server's certificate, in the place of the system's.
    """

    url: str
    api: str = "embeddings"
    path: str | None = None
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    encoding_format: str | None = None
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    ca_file: Path | None = None

    def __post_init__(self) -> None:
        if self.api not in APIS:
            raise InvalidRequestError(f"there is no api {self.api!r}; choose of {', '.join(APIS)}")
        if self.api != "embeddings" and (self.encoding_format or self.dimensions):
            raise InvalidRequestError(f"the api {self.api!r} has no encoding_format and no dimensions")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise InvalidRequestError("the api_key holds what no header can: use printable ASCII")
        try:
            usable = self._parts.scheme in ("http", "https") and self._parts.hostname and self._parts.port != 0
        except ValueError:  # a port that is none
            usable = False
        if not usable:
            raise InvalidRequestError(f"{self.url!r} is no address; write it as http://127.0.0.1:8000")

    @property
    def _parts(self) -> SplitResult:
        return urlsplit(self.url)

    @property
    def host(self) -> str:
        """The server's name or address."""
        assert self._parts.hostname is not None
        return self._parts.hostname

    @property
    def port(self) -> int:
        """The server's port."""
        return self._parts.port or (443 if self._parts.scheme == "https" else 80)

    @property
    def endpoint(self) -> str:
        """The whole address of the route."""
        return self.url.rstrip("/") + (self.path or APIS[self.api].path)

    def tls(self) -> ssl.SSLContext | None:
        """How to speak TLS; None for plain HTTP.

        Raises:
            InvalidRequestError: ``ca_file`` cannot be read.
        """
        if self._parts.scheme != "https":
            return None
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:
            raise InvalidRequestError(f"ca_file {str(self.ca_file)!r} cannot be used: {error}") from error

    def message(self, query: str, texts: Sequence[str]) -> bytes:
        """One request, head and body; a query is left out where the API has none."""
        names = ("model", "encoding_format", "dimensions", "truncate_prompt_tokens")
        fields = {name: value for name in names if (value := getattr(self, name)) is not None}
        body = json.dumps({**fields, **APIS[self.api].body(query, texts)}, ensure_ascii=False).encode()
        return self._head("POST", self.path or APIS[self.api].path, len(body)) + body

    def question(self, path: str) -> bytes:
        """A GET of another route of the same server."""
        return self._head("GET", path, 0)

    def check(self, body: bytes, texts: int) -> None:
        """Whether an answer has a row for each of ``texts`` texts.

        Raises:
            UnusableAnswerError: It has not.
        """
        key = APIS[self.api].rows
        try:
            found = json.loads(body)
            rows = found if key is None else found[key]
            count = len(rows)
        except (ValueError, LookupError, TypeError):
            raise UnusableAnswerError(f"{self.endpoint} answers nothing with rows: {excerpt(body)}") from None
        if count != texts:
            raise UnusableAnswerError(f"{self.endpoint} answers {texts} texts with {count} rows: {excerpt(body)}")

    def _head(self, method: str, path: str, length: int) -> bytes:
        lines = [
            f"{method} {self._parts.path.rstrip('/')}{path} HTTP/1.1",
            f"Host: {self._parts.netloc.rpartition('@')[2]}",
            "Accept: application/json",
            "User-Agent: millpond-bench-serve",
        ]
        if method == "POST":
            lines += ["Content-Type: application/json", f"Content-Length: {length}"]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1")


def tokens_of(body: bytes) -> int | None:
    """The tokens that an answer counts in ``usage``, found without parsing the vectors."""
    for part in (body[-_TAIL:], body):
        if usages := _USAGE.findall(part):
            found = _TOKENS.search(usages[-1])
            return int(found[1]) if found else None
    return None


def excerpt(body: bytes) -> str:
    """The beginning of an answer, for a message."""
    text = " ".join(body[:400].decode(errors="replace").split())
    return text[:200] + ("..." if len(text) > 200 else "") if text else "an empty body"
