"""Row: a stored row, and where in the fields of any collection its text, title and document are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

from millpond.errors import InvalidRequestError
from millpond.ingest.sinks.batch import FloatArray
from millpond.support.cached_property import cached_property

T = TypeVar("T")

# Where texts are, in the order in which they are looked for: LangChain, millpond, LlamaIndex, and by hand.
_TEXTS = (
    "page_content",
    "text",
    "document",
    "content",
    "chunk_text",
    "chunk",
    "body",
    "passage",
    "sentence",
    "abstract",
    "description",
)
_NODE = "_node_content"  # LlamaIndex's node, as JSON
_METADATA = ("metadata", "metadata_", "cmetadata", "meta")
_TITLES = ("title", "heading", "headline", "subject", "name", "file_name")
_DOCUMENTS = ("doc_id", "document_id", "ref_doc_id", "parent_id", "source_id", "source", "file_path", "url")
_STARTS = ("chunk_start", "start_index", "start_char_idx")
_LEAST_CHARS = 20  # of a field that may be the text, on average, where none has a known name


@dataclass(frozen=True, kw_only=True)
class TextField:
    """Where the text of a row is.

    Attributes:
        path: Keys, one in the other; of a text in LlamaIndex's node the key of the node.
        hashed: Whether millpond's hash of the text is beside it.
    """

    path: tuple[str, ...]
    hashed: bool = False

    @classmethod
    def find(cls, rows: Sequence[Mapping[str, Any]], name: str | None, *, hashed: bool) -> TextField | None:
        """The field of a name, or a guess.

        Args:
            rows: Some rows.
            name: Its name, dots between keys; ``None`` for a guess.
            hashed: Whether millpond made the collection.

        Returns:
            The field; ``None`` if no field looks like texts.

        Raises:
            InvalidRequestError: No row has a field of this name.
        """
        if name is not None:
            found = next((path for path in ((name,), tuple(name.split("."))) if _has(rows, path)), None)
            if found is None:
                known = ", ".join(dict.fromkeys(key for row in rows for key in row)) or "none"
                raise InvalidRequestError(f"text={name!r} is no field of the rows; they have {known}")
            return cls(path=found, hashed=False)
        if any(_node_text(row) for row in rows):
            return cls(path=(_NODE,), hashed=hashed)
        outer = [(name,) for name in _TEXTS]
        inner = [(key, name) for key in _METADATA for name in _TEXTS]
        for path in (*outer, *inner):
            if _has(rows, path):
                return cls(path=path, hashed=hashed)
        return cls._longest(rows)

    @classmethod
    def _longest(cls, rows: Sequence[Mapping[str, Any]]) -> TextField | None:
        """The field of str with the most characters."""
        sizes: dict[str, int] = {}
        for row in rows:
            for key, value in row.items():
                if isinstance(value, str) and not value.startswith(("{", "[")) and key != "content_hash":
                    sizes[key] = sizes.get(key, 0) + len(value)
        best = max(sizes, key=sizes.__getitem__, default=None)
        return None if best is None or sizes[best] < _LEAST_CHARS * len(rows) else cls(path=(best,))

    @property
    def words(self) -> str:
        """The path, as ``--text`` takes it."""
        return ".".join(self.path)

    def of(self, fields: Mapping[str, Any]) -> str | None:
        """The text of a row; ``None`` if it has none."""
        if self.path == (_NODE,):
            return _node_text(fields)
        value = fields.get(self.path[0]) if len(self.path) == 1 else _at(fields, self.path)
        return value if isinstance(value, str) else None

    def hash_of(self, fields: Mapping[str, Any]) -> str:
        """The hash that millpond stored of the text; empty if there is none."""
        value = fields.get("content_hash") if self.hashed else None
        return value if isinstance(value, str) else ""


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """A row that is looked at.

    Attributes:
        index: Its place in the order of the database.
        id: Its id.
        text: Its text; ``None`` if it has none.
        vector: ``[width]`` as stored.
        fields: Its other fields.
    """

    index: int
    id: str
    text: str | None
    vector: FloatArray
    fields: Mapping[str, Any] = field(repr=False)

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """All metadata on one level: fields, and what is inside metadata and nodes."""
        return _flat(self.fields)

    def variants(self) -> dict[str, str]:
        """The texts of this row that people embed, by a name: as stored, stripped, in lower case, with a title."""
        text = self.text or ""
        found = {"as stored": text, "stripped": text.strip(), "lower case": text.lower()}
        title = next((value for name in _TITLES if isinstance(value := self.metadata.get(name), str) and value), None)
        if title is not None:
            found |= {
                "title, space, text": f"{title} {text}",
                "title, line, text": f"{title}\n{text}",
                "title, empty line, text": f"{title}\n\n{text}",
                "title, colon, text": f"{title}: {text}",
                "title, full stop, text": f"{title}. {text}",
            }
        if (node := _mapping(self.fields.get(_NODE))).get("metadata"):
            found["LlamaIndex's metadata and text"] = _node_embed_text(node, text)
        return found

    @property
    def document(self) -> str | None:
        """What tells its document from others; ``None`` if that is not known."""
        return document_of(self.fields)

    @property
    def start(self) -> int | None:
        """Where the text begins in its document."""
        found = (self.metadata.get(name) for name in _STARTS)
        return next((value for value in found if isinstance(value, int) and not isinstance(value, bool)), None)


def document_of(fields: Mapping[str, Any]) -> str | None:
    """What tells a row's document from others; ``None`` if that is not known."""
    known = _flat(fields)
    if "chunk_start" in known:  # of millpond
        own = next((value for name in ("id", "record_id") if (value := fields.get(name))), None)
        if own is not None:
            return str(own)
    return next((str(value) for name in _DOCUMENTS if (value := known.get(name))), None)


def batches(values: Iterable[T], size: int) -> Iterator[list[T]]:
    """The values in lists of at most so many."""
    rest = iter(values)
    while part := list(islice(rest, size)):
        yield part


def _flat(fields: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(fields)
    for key in _METADATA:
        found |= _mapping(fields.get(key))
    node = _mapping(fields.get(_NODE))
    start = node.get("start_char_idx")
    return found | _mapping(node.get("metadata")) | ({} if start is None else {"start_char_idx": start})


def _has(rows: Sequence[Mapping[str, Any]], path: tuple[str, ...]) -> bool:
    return any(isinstance(_at(row, path), str) for row in rows)


def _at(fields: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        fields = _mapping(fields).get(key)
    return fields


def _mapping(value: Any) -> dict[str, Any]:
    """A mapping, which a database may keep as JSON; empty for anything else."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, str) and value.startswith("{"):
        try:
            return dict(json.loads(value))
        except ValueError:
            return {}
    return {}


def _node_text(fields: Mapping[str, Any]) -> str | None:
    if _NODE not in fields:
        return None
    node = _mapping(fields[_NODE])
    text = node.get("text") or _mapping(node.get("text_resource")).get("text")
    return text if isinstance(text, str) and text else None


def _node_embed_text(node: Mapping[str, Any], text: str) -> str:
    """What LlamaIndex embeds of a node: its metadata, but for excluded keys, and its text, by its templates."""
    excluded = set(node.get("excluded_embed_metadata_keys") or ())
    line = node.get("metadata_template") or "{key}: {value}"
    metadata = (node.get("metadata_separator") or "\n").join(
        line.replace("{key}", str(key)).replace("{value}", str(value))
        for key, value in _mapping(node.get("metadata")).items()
        if key not in excluded
    )
    template = node.get("text_template") or "{metadata_str}\n\n{content}"
    return str(template).replace("{metadata_str}", metadata).replace("{content}", text).strip() if metadata else text
