"""Target: the endpoint under load, and its HTTP requests."""

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
    """The endpoint does not answer, or its answer is not usable."""


@dataclass(frozen=True, kw_only=True)
class Api:
    """One format of requests and answers.

    Attributes:
        path: The usual path.
        body: Makes the fields of a request from (query, texts).
        rows: Key of the list in the answer with a row for each text; ``None`` if the answer is that list.
        needs_query: Whether a request has a query besides its texts.
    """

    path: str
    body: Callable[[str, Sequence[str]], dict[str, Any]]
    rows: str | None
    needs_query: bool = True


APIS: Mapping[str, Api] = {
    "embeddings": Api(
        path="/v1/embeddings", body=lambda query, texts: {"input": list(texts)}, rows="data", needs_query=False
    ),
    "rerank": Api(path="/rerank", body=lambda query, texts: {"query": query, "documents": list(texts)}, rows="results"),
    "score": Api(path="/score", body=lambda query, texts: {"text_1": query, "text_2": list(texts)}, rows="data"),
    "ollama": Api(
        path="/api/embed", body=lambda query, texts: {"input": list(texts)}, rows="embeddings", needs_query=False
    ),
    # The native routes of text-embeddings-inference; its OpenAI route is `embeddings`.
    "tei-embed": Api(path="/embed", body=lambda query, texts: {"inputs": list(texts)}, rows=None, needs_query=False),
    "tei-rerank": Api(path="/rerank", body=lambda query, texts: {"query": query, "texts": list(texts)}, rows=None),
}

# The last match in a body is the server's: servers write usage at the end, and quotes within texts are escaped.
_USAGE = re.compile(rb'"usage"\s*:\s*\{([^{}]*)|("prompt_eval_count"\s*:\s*\d+)')  # the second: Ollama's
_TOKENS = re.compile(rb'"(?:prompt_tokens|total_tokens|prompt_eval_count)"\s*:\s*(\d+)')
_TAIL = 2048


@dataclass(frozen=True, kw_only=True)
class Target:
    """An endpoint under load.

    Attributes:
        url: ``http://host:port`` or ``https://...``, optionally with a path prefix.
        api: A key of ``APIS``.
        path: Replaces the API's usual path.
        model: The model's name on the server; ``None`` leaves the field out.
        api_key: Sent as a bearer token.
        encoding_format: ``float`` or ``base64`` of the embeddings API; ``None`` leaves the field out.
        dimensions: Matryoshka width of the embeddings API; ``None`` leaves the field out.
        truncate_prompt_tokens: Cut longer texts to this many tokens, -1 for the model's limit; ``None`` leaves the
            field out.
        ca_file: PEM file of the authorities for the server's certificate, instead of the system's.
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
        except ValueError:  # an invalid port
            usable = False
        if not usable:
            raise InvalidRequestError(f"{self.url!r} is no address; write it as http://127.0.0.1:8000")

    @property
    def _parts(self) -> SplitResult:
        return urlsplit(self.url)

    @property
    def host(self) -> str:
        """The server's host name or address."""
        assert self._parts.hostname is not None
        return self._parts.hostname

    @property
    def port(self) -> int:
        """The server's port."""
        return self._parts.port or (443 if self._parts.scheme == "https" else 80)

    @property
    def endpoint(self) -> str:
        """The full URL of the route."""
        return self.url.rstrip("/") + (self.path or APIS[self.api].path)

    def tls(self) -> ssl.SSLContext | None:
        """The TLS context; ``None`` for plain HTTP.

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
        """One request, head and body; ``query`` is ignored by APIs without one."""
        names = ("model", "encoding_format", "dimensions", "truncate_prompt_tokens")
        fields = {name: value for name in names if (value := getattr(self, name)) is not None}
        body = json.dumps({**fields, **APIS[self.api].body(query, texts)}, ensure_ascii=False).encode()
        return self._head("POST", self.path or APIS[self.api].path, len(body)) + body

    def get(self, path: str) -> bytes:
        """A GET request for another path of the same server."""
        return self._head("GET", path, 0)

    def check(self, body: bytes, texts: int) -> None:
        """Check that an answer has a row for each of ``texts`` texts.

        Raises:
            UnusableAnswerError: It does not.
        """
        key = APIS[self.api].rows
        try:
            content = json.loads(body)
            rows = content if key is None else content[key]
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
            "User-Agent: millpond-load",
        ]
        if method == "POST":
            lines += ["Content-Type: application/json", f"Content-Length: {length}"]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1")


def tokens_of(body: bytes) -> int | None:
    """The token count in the answer's ``usage``, read without parsing the vectors."""
    for part in (body[-_TAIL:], body):
        if usages := _USAGE.findall(part):
            tokens = _TOKENS.search(b"".join(usages[-1]))
            return int(tokens[1]) if tokens else None
    return None


def excerpt(body: bytes) -> str:
    """The start of an answer, for a message."""
    text = " ".join(body[:400].decode(errors="replace").split())
    return text[:200] + ("..." if len(text) > 200 else "") if text else "an empty body"
