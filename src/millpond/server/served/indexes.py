"""ServedIndexes: the late-interaction indexes of a server, by name, each with the model that built it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from millpond.errors import FingerprintMismatchError, InvalidRequestError
from millpond.late_interaction.index.base import LateInteractionIndex
from millpond.late_interaction.plaid.index import PlaidIndex
from millpond.server.errors import RequestError
from millpond.server.served.models import ServedModel, ServedModels

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, kw_only=True)
class ServedIndex:
    """An index that clients search."""

    name: str  # its name in the routes
    index: LateInteractionIndex
    model: ServedModel  # the model that encodes queries and documents
    # Held while the index is changed, so that waiting writers occupy no threads.
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)


class ServedIndexes:
    """Every index of a server."""

    def __init__(self, indexes: Sequence[ServedIndex] = ()) -> None:
        self._by_name = {index.name: index for index in indexes}

    @classmethod
    def load(cls, settings: Sequence[str], models: ServedModels) -> Self:
        """Open every index with the model that built it; if one fails, those already open are closed."""
        paths: dict[str, Path] = {}
        for setting in settings:
            name, path = _parsed(setting)
            if name in paths:
                raise InvalidRequestError(f"two indexes are called {name!r}; give each its own name")
            paths[name] = path
        opened: list[ServedIndex] = []
        try:
            for name, path in paths.items():
                opened.append(_open(name, path, models))
        except BaseException:
            for served in opened:
                served.index.close()
            raise
        return cls(opened)

    def __iter__(self) -> Iterator[ServedIndex]:
        return iter(self._by_name.values())

    def find(self, name: str) -> ServedIndex:
        """The index of a name."""
        served = self._by_name.get(name)
        if served is None:
            raise RequestError(
                f"The index `{name[:128]}` does not exist.", status=404, type="NotFoundError", param="name"
            )
        return served

    def close(self) -> None:
        """Close every index."""
        for served in self:
            served.index.close()


def _parsed(setting: str) -> tuple[str, Path]:
    name, separator, path = setting.partition("=")
    if not separator or not path:
        raise InvalidRequestError(
            f"index={setting!r} is not NAME=PATH; name the index and its folder, as docs=./docs.index"
        )
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"index={setting!r} begins with no name for a route; use at most 128 letters, digits, dots, dashes and "
            "underscores"
        )
    return name, Path(path).expanduser()


def _open(name: str, path: Path, models: ServedModels) -> ServedIndex:
    PlaidIndex.open(path).close()  # without it nothing is created, and a damaged one is an error of its own
    able = [model for model in models if "token_embed" in model.engine.tasks]
    mismatch: FingerprintMismatchError | None = None
    for model in able:
        try:
            return ServedIndex(name=name, index=PlaidIndex.open(path, model.engine), model=model)
        except FingerprintMismatchError as error:
            mismatch = error
    if mismatch is not None and len(able) == 1:
        raise mismatch
    raise FingerprintMismatchError(
        f"none of the served models built the index {name!r} at {str(path)!r}; serve the model that built it"
    ) from mismatch
