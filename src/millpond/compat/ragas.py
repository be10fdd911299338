"""MillpondEmbeddings: the embeddings of Ragas' metrics, by a model that runs in this process.

Only its users import this module: it needs ragas.
"""

from __future__ import annotations

from typing import Any

from millpond.errors import MissingExtraError

try:
    from ragas.embeddings.base import BaseRagasEmbedding

    from millpond.compat.composed import Embedder
except ImportError as error:
    raise MissingExtraError(f"MillpondEmbeddings needs ragas ({error}): pip install ragas") from error


class MillpondEmbeddings(BaseRagasEmbedding):
    """Embeds the texts that a metric compares, all alike, as Ragas' ``HuggingFaceEmbeddings`` does.

    A checkpoint's prompts for queries and documents are left out; its default prompt is read, as in
    ``SentenceTransformer.encode``. The model is loaded at the first text.

    Args:
        model: Hub id or local folder.
        **options: The fields of :class:`millpond.compat.adapter.EmbeddingSource` and the classes that it derives from,
            as ``dtype``, ``engine``, ``cache`` (the path of a vector cache, not a cache of Ragas), and
            ``document_prompt``, which is put before every text.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        super().__init__()
        if options.get("document_prompt") is None:
            options = {"document_prompt_name": "", **options}
        self._source = Embedder(model=model, **options)

    def embed_text(self, text: str, **kwargs: Any) -> list[float]:
        """The vector of a text.

        Args:
            text: The text.
            **kwargs: Options of other providers, which are not read.

        Returns:
            The vector.
        """
        return self.embed_texts([text])[0]

    async def aembed_text(self, text: str, **kwargs: Any) -> list[float]:
        """As :meth:`embed_text`, without blocking the event loop."""
        return (await self.aembed_texts([text]))[0]

    def embed_texts(self, texts: list[str], **kwargs: Any) -> list[list[float]]:
        """The vectors of texts, in batches of the engine."""
        return self._source.embed(texts, "document").tolist()

    async def aembed_texts(self, texts: list[str], **kwargs: Any) -> list[list[float]]:
        """As :meth:`embed_texts`, without blocking the event loop."""
        return await self._source.aembed(texts, "document")
