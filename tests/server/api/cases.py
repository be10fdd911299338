"""Cases: a request to a route, and what it is answered with; one table for each dialect."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tests.tiny import SENTENCES

from millpond import Engine

TEXTS = list(SENTENCES[:4])
LONG = " ".join(SENTENCES)
QUERY = "How deep is the mill pond?"
DOCUMENTS = ["The pond is two metres deep.", "The miller sells flour.", "A wheel turns.", "The miller sells flour."]
ATOL = 2e-6

Engines = Mapping[str, Engine]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A request and its response.

    Attributes:
        path: Where it goes.
        body: Its JSON; ``None``: a GET.
        same: Makes what the response holds from the engines by name: mappings may leave keys out, arrays are compared
            within a tolerance, patterns searched.
        status: The status.
        part: A pattern in the error's message.
        param: The error's field; ``...``: any.
    """

    path: str
    body: Any = None
    same: Callable[[Engines], Any] = lambda _: {}
    status: int = 200
    part: str = ""
    param: Any = ...

    @property
    def id(self) -> str:
        """Its name in reports."""
        return f"{self.path} {self.status} {self.body}"[:90]


def refused(path: str, model: str | None, rows: list[tuple[Any, ...]], status: int = 400) -> list[Case]:
    """A case for each row: body, pattern, and optionally the field or the status."""
    cases = []
    for body, part, *more in rows:
        (param,) = [each for each in more if not isinstance(each, int)] or [...]
        (code,) = [each for each in more if isinstance(each, int)] or [status]
        named = body if model is None or not isinstance(body, dict) else {"model": model, **body}
        cases.append(Case(path=path, body=named, status=code, part=part, param=param))
    return cases


def check(actual: Any, expected: Any, where: str = "body") -> None:
    """Compare a response with what a case expects."""
    if isinstance(expected, Mapping):
        for key, value in expected.items():
            assert key in actual, f"{where} has no {key}"
            check(actual[key], value, f"{where}.{key}")
    elif isinstance(expected, np.ndarray | np.floating | float):
        np.testing.assert_allclose(np.array(actual, dtype=np.float64), expected, atol=ATOL, rtol=1e-5, err_msg=where)
    elif isinstance(expected, list):
        assert len(actual) == len(expected), where
        for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
            check(one, other, f"{where}[{i}]")
    elif isinstance(expected, type):
        assert isinstance(actual, expected), where
    elif isinstance(expected, re.Pattern):
        assert expected.search(actual), f"{where}={actual!r}"
    else:
        assert actual == expected, where


def decoded(text: str, kind: str = "<f4") -> Any:
    """The numbers of a base64 text."""
    return np.frombuffer(base64.b64decode(text), dtype=kind)
