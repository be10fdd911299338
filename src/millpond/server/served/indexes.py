"""ServedIndexes: the late-interaction indexes of a server, by name, each with the model that built it."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeVar

from millpond.errors import FingerprintMismatchError, IndexCorruptedError, InvalidRequestError, SourceNotFoundError
from millpond.late_interaction.index.base import LateInteractionIndex
from millpond.late_interaction.plaid.index import PlaidIndex
from millpond.server.errors import RequestError
from millpond.server.served.models import ServedModel, ServedModels
from millpond.support.similar import list_names

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, kw_only=True)
class ServedIndex:
    """An index that clients search."""

    name: str  # its name in the routes
    index: LateInteractionIndex
    model: ServedModel  # the model that encodes queries and documents
    # Held while the index is changed, so that waiting writers occupy no threads.
    writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, work: Callable[[], Result]) -> Result:
        """What ``work`` on the index returns, called in a thread; 503 if a file of the index is damaged or missing."""
        try:
            return await asyncio.to_thread(work)
        except (IndexCorruptedError, FileNotFoundError, SourceNotFoundError) as error:
            logger.error("the index %s cannot be read: %s", self.name, error)
            raise damaged(self.name) from error


def damaged(name: str) -> RequestError:
    """The answer for an index with a damaged file, which only the log names."""
    return RequestError(
        f"The index `{name}` is damaged, and the server's log says where; the other indexes and the models serve. "
        "Restore or rebuild it",
        status=503,
        type="ServiceUnavailableError",
        param="name",
    )


class ServedIndexes:
    """Every index of a server."""

    def __init__(self, indexes: Sequence[ServedIndex] = (), damaged: Sequence[str] = ()) -> None:
        self._by_name = {index.name: index for index in indexes}
        self.damaged = tuple(damaged)  # names of those that could not be opened

    @classmethod
    def load(cls, settings: Sequence[str], models: ServedModels) -> Self:
        """Open every index with the model that built it; if one fails, those already open are closed.

        One with a damaged file is logged, and the server answers 503 for it.
        """
        paths: dict[str, Path] = {}
        for setting in settings:
            name, path = _parsed(setting)
            if name in paths:
                raise InvalidRequestError(f"two indexes are called {name!r}; give each its own name")
            paths[name] = path
        opened: list[ServedIndex] = []
        broken: list[str] = []
        try:
            for name, path in paths.items():
                try:
                    opened.append(_open(name, path, models))
                except IndexCorruptedError as error:
                    logger.error("the index %s is damaged and answers 503: %s", name, error)
                    broken.append(name)
        except BaseException:
            for served in opened:
                served.index.close()
            raise
        return cls(opened, broken)

    def __iter__(self) -> Iterator[ServedIndex]:
        return iter(self._by_name.values())

    def find(self, name: str) -> ServedIndex:
        """The index of a name."""
        if name in self.damaged:
            raise damaged(name)
        served = self._by_name.get(name)
        if served is None:
            known = list_names(name, self._by_name)
            ways = f"this server has {known}" if known else "this server has none"
            raise RequestError(
                f"The index `{name[:128]}` does not exist; {ways}.", status=404, type="NotFoundError", param="name"
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
