"""What the components of this package have in common: the engine, how Haystack writes it, and the texts it reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

from haystack import Document, default_from_dict, default_to_dict
from haystack.core.errors import SerializationError
from haystack.utils import ComponentDevice

from millpond.compat.composed import ModelSource

Source = TypeVar("Source", bound=ModelSource)


class EngineComponent(Generic[Source]):
    """A component over a model in this process, which is loaded by ``warm_up`` or at the first ``run``.

    All components of one configuration share one engine. ``run_async`` does not block the event loop.
    """

    _source: Source
    _own: dict[str, Any]  # the arguments of the component itself, by their names

    def warm_up(self) -> None:
        """Load the model."""
        self._source.load()

    async def warm_up_async(self) -> None:
        """Load the model, without blocking the event loop."""
        await self._source.aload()

    def to_dict(self) -> dict[str, Any]:
        """The component as Haystack writes it.

        Returns:
            Its type and its arguments.

        Raises:
            SerializationError: The component holds an engine.
        """
        try:
            options = self._source.options()
        except TypeError as error:
            raise SerializationError(f"{type(self).__name__}: {error}") from None
        return dict(default_to_dict(self, **options, **self._own))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The component that :meth:`to_dict` wrote.

        Args:
            data: What it returned.

        Returns:
            An equal component.
        """
        made: Self = default_from_dict(cls, data)
        return made


class TextComponent(EngineComponent[Source]):
    """A component that reads one query.

    Args:
        model: Hub id or local folder.
        prefix: Put before the query, instead of the checkpoint's prompt; ``""`` for none.
        suffix: Put behind the query.
        progress_bar: Draw a progress bar, if standard error is a terminal, or in a notebook.
        **options: The other fields of the source.
    """

    source: type[Source]

    def __init__(
        self,
        model: str | None = None,
        *,
        prefix: str | None = None,
        suffix: str = "",
        progress_bar: bool = False,
        **options: Any,
    ) -> None:
        prompt: dict[str, Any] = {} if prefix is None else {"query_prompt": prefix}
        self._source = self.source(model=model, **engine_options(options), **prompt)
        self._own = {"suffix": suffix, "progress_bar": progress_bar}

    def _texts(self, text: str) -> list[str]:
        if not isinstance(text, str):
            kind = type(text).__name__
            raise TypeError(
                f"{type(self).__name__} takes a str, not a {kind}; embed documents with a document embedder"
            )
        return [text + self._own["suffix"]]


class DocumentComponent(EngineComponent[Source]):
    """A component that reads documents, and returns copies of them.

    Args:
        model: Hub id or local folder.
        prefix: Put before each document, instead of the checkpoint's prompt; ``""`` for none.
        suffix: Put behind each document.
        progress_bar: Draw a progress bar, if standard error is a terminal, or in a notebook.
        meta_fields_to_embed: Keys of the metadata that are read before the content.
        embedding_separator: What stands between them.
        **options: The other fields of the source.
    """

    source: type[Source]

    def __init__(
        self,
        model: str | None = None,
        *,
        prefix: str | None = None,
        suffix: str = "",
        progress_bar: bool = False,
        meta_fields_to_embed: list[str] | None = None,
        embedding_separator: str = "\n",
        **options: Any,
    ) -> None:
        prompt: dict[str, Any] = {} if prefix is None else {"document_prompt": prefix}
        self._source = self.source(model=model, **engine_options(options), **prompt)
        self._own = {
            "suffix": suffix,
            "progress_bar": progress_bar,
            "meta_fields_to_embed": list(meta_fields_to_embed or ()),
            "embedding_separator": embedding_separator,
        }

    def _texts(self, documents: list[Document]) -> list[str]:
        documents = listed(documents, type(self).__name__)
        fields, separator = self._own["meta_fields_to_embed"], self._own["embedding_separator"]
        return [text + self._own["suffix"] for text in texts_of(documents, fields, separator)]


def texts_of(documents: Sequence[Document], fields: Sequence[str], separator: str) -> list[str]:
    """The text of each document: the chosen metadata that it has, and its content."""
    return [
        separator.join([*(str(each.meta[key]) for key in fields if each.meta.get(key) is not None), each.content or ""])
        for each in documents
    ]


def listed(documents: object, name: str) -> list[Document]:
    """The documents; TypeError for anything but a list of them."""
    if not isinstance(documents, list) or not all(isinstance(document, Document) for document in documents):
        raise TypeError(f"{name} takes a list of documents; a text alone is for a text embedder")
    return documents


def engine_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with Haystack's ``ComponentDevice`` as a name."""
    device = options.get("device")
    return {**options, "device": device.to_torch_str()} if isinstance(device, ComponentDevice) else dict(options)
