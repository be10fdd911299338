"""SearchService: the tools, without the protocol."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from millpond.errors import InvalidRequestError, SourceNotFoundError
from millpond.mcp.targets.collection import CollectionTarget
from millpond.mcp.targets.folder import FolderTarget
from millpond.mcp.targets.index import IndexTarget
from millpond.mcp.targets.target import Found, Target, TargetOptions
from millpond.support.blank import is_blank
from millpond.support.similar import list_names

logger = logging.getLogger(__name__)

MAX_RESULTS = 100
_SEPARATOR = "::"  # between the name of a target and an id, where there are several targets


def open_target(word: str, name: str, options: TargetOptions) -> Target:
    """The target that a word of the command line names; a database's URL, or a folder."""
    head, colon, _ = word.partition(":")
    if colon and "+" in head and not Path(word).exists():
        return CollectionTarget(name, word, options)
    path = Path(word).expanduser()
    if not path.is_dir():
        kind = (
            "a file; name the folder that it is in" if path.exists() else "neither a folder nor the URL of a collection"
        )
        raise SourceNotFoundError(f"{word!r} is {kind}")
    return IndexTarget(name, path, options) if IndexTarget.is_at(path) else FolderTarget(name, path, options)


def names_of(words: Sequence[str]) -> list[str]:
    """A short name for each target, all different."""
    names: list[str] = []
    for word in words:
        own = word.rpartition("#")[2] if "#" in word else Path(word).expanduser().resolve().name
        own = own.replace(_SEPARATOR, "_") or "root"
        names.append(own if own not in names else f"{own}-{len(names) + 1}")
    return names


class SearchService:
    """Several targets, searched as one."""

    def __init__(self, words: Sequence[str], options: TargetOptions) -> None:
        names = names_of(words)
        self.targets = [open_target(word, name, options) for word, name in zip(words, names, strict=True)]
        self._loaded = threading.Event()
        self._error: BaseException | None = None

    def start(self) -> None:
        """Load the targets in a thread; the tools wait for it."""
        threading.Thread(target=self._load, name="millpond-load", daemon=True).start()

    def _load(self) -> None:
        try:
            for target in self.targets:
                target.load()
        except BaseException as error:
            self._error = error
            logger.error("%s", error)
        finally:
            self._loaded.set()

    def wait(self) -> None:
        """Wait until the targets are loaded, and raise what kept them from it."""
        self._loaded.wait()
        if self._error is not None:
            raise self._error

    def search(self, query: str, k: int, filter: Mapping[str, Any] | None, name: str | None = None) -> list[Found]:
        """The best texts; of several targets the best of each, then the second ones, and so on."""
        if is_blank(query):
            raise InvalidRequestError("query is blank; write what to look for")
        if not 1 <= k <= MAX_RESULTS:
            raise InvalidRequestError(f"top_k={k} must be 1 to {MAX_RESULTS}")
        self.wait()
        chosen = self.targets if name is None else [self._named(name)]
        found = [[self._outside(target, each) for each in target.search(query, k, filter)] for target in chosen]
        longest = max(map(len, found))
        return [each[rank] for rank in range(longest) for each in found if rank < len(each)][:k]

    def get(self, id: str) -> Found:
        """A text by the id of a hit."""
        target, inner = self._inside(id)
        return self._outside(target, self._text(target, inner, id))

    def explain(self, query: str, id: str) -> list[Any]:
        """Where each token of a query finds its best match in a text."""
        if is_blank(query):
            raise InvalidRequestError("query is blank; write what was looked for")
        target, inner = self._inside(id)
        return target.explain(query, self._text(target, inner, id))

    def add(
        self, name: str | None, ids: Sequence[str], texts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> tuple[str, int]:
        """Store texts; returns the target's name, and how many."""
        for id, text in zip(ids, texts, strict=True):
            if is_blank(text):
                raise InvalidRequestError(f"the text of {id!r} is blank, and would never be found")
        self.wait()
        target = self._named(name)
        return target.name, target.add(ids, texts, metadata)

    def delete(self, name: str | None, ids: Sequence[str]) -> str:
        """Delete texts by their ids; returns the target's name."""
        self.wait()
        if name is None and len(self.targets) > 1 and ids:
            name = self._inside(ids[0])[0].name
        target = self._named(name)
        target.delete([id.removeprefix(f"{target.name}{_SEPARATOR}") for id in ids])
        return target.name

    def close(self) -> None:
        """Close the targets, if they are loaded."""
        if self._loaded.is_set():
            for target in self.targets:
                target.close()

    def _text(self, target: Target, inner: str, id: str) -> Found:
        found = target.get(inner)
        if found is None:
            raise InvalidRequestError(f"there is no text of id {id!r} now; take the id of a hit, or search again")
        return found

    def _named(self, name: str | None) -> Target:
        if name is None and len(self.targets) == 1:
            return self.targets[0]
        for target in self.targets:
            if target.name == name:
                return target
        known = list_names(name or "", [target.name for target in self.targets])
        raise InvalidRequestError(f"target={name!r} is none of {known}")

    def _outside(self, target: Target, found: Found) -> Found:
        if len(self.targets) == 1:
            return found
        id = f"{target.name}{_SEPARATOR}{found.id}"
        return Found(id=id, text=found.text, metadata=found.metadata, score=found.score)

    def _inside(self, id: str) -> tuple[Target, str]:
        self.wait()
        if len(self.targets) == 1:
            return self.targets[0], id
        name, _, inner = id.partition(_SEPARATOR)
        return self._named(name), inner
