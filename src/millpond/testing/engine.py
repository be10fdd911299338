"""WordEngine: an engine that needs no model, for the tests of sinks and indexes."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.tasks import Role
from millpond.values.outputs import EmbeddingOutput, TokenEmbeddingOutput, TokenSpans, Usage
from millpond.values.spec import ModelSpec
from millpond.vectors import matryoshka
from millpond.vectors.ragged import Ragged

_WORD = re.compile(r"\w+|[^\w\s]")


class WordEngine:
    """Every word has a direction, the same for ever; a text is the sum of its words, and its tokens are they.

    Args:
        name: The name of the model; engines of other names are other models.
        dimensions: Width of the vectors.
        max_length: Most words of a text.
    """

    def __init__(self, name: str = "words", *, dimensions: int = 384, max_length: int = 64) -> None:
        self._name = name
        self.spec = ModelSpec(
            name=name,
            architecture="Words",
            model_type="words",
            pooling=("mean",),
            normalize=True,
            dimensions=dimensions,
            hidden_size=dimensions,
            matryoshka=True,
            matryoshka_dimensions=None,
            prompts={},
            default_prompt_name=None,
            labels=(),
            max_length=max_length,
            tasks=frozenset({"embed", "token_embed"}),
            settings={"max_length": max_length},
            digest=lambda: f"{zlib.crc32(f'{name} {dimensions} {max_length}'.encode()):064x}",
        )

    def embed(
        self,
        texts: Sequence[str],
        *,
        role: Role | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
    ) -> EmbeddingOutput:
        """The sum of each text's words, ``[n, d]``, cut to ``dimensions``; the role changes nothing.

        Args:
            texts: A list of texts.
            role: Ignored.
            dimensions: The width of the vectors; ``None`` for the full one.
            normalize: ``False`` leaves the length of a vector as it is.

        Returns:
            The vectors ``[n, dimensions]``.

        Raises:
            InvalidDimensionsError: The width is not from 1 to the full one.
        """
        rows = [sum((self._row(word) for word in self._words(text)), np.zeros(1)) for text in texts]
        flat = np.array([row + np.zeros(self.spec.dimensions) for row in rows], dtype=np.float32)
        flat = flat.reshape(len(texts), self.spec.dimensions)
        cut = matryoshka.cut(flat, self.spec.check_dimensions(dimensions), normalize=normalize is not False)
        none = np.zeros(len(texts), dtype=np.bool_)
        return EmbeddingOutput(embeddings=cut, cached=none, truncated=none, usage=Usage(prompt_tokens=0))

    def token_embed(
        self, texts: Sequence[str], *, role: Role | None = None, normalize: bool | None = None
    ) -> TokenEmbeddingOutput:
        """A row of length 1 for the role, and for each word of a text: matrices ``[tokens_i, d]``.

        Args:
            texts: A list of texts.
            role: ``"query"`` or ``"document"``.
            normalize: Ignored: every row has length 1.

        Returns:
            The matrices, and which texts were cut.
        """
        matrices = [np.array([self._row(token) for token in self._tokens(text, role)]) for text in texts]
        ragged = Ragged.from_matrices([rows.astype(np.float32) for rows in matrices], width=self.spec.dimensions)
        long = np.array([len(_WORD.findall(text)) > self.spec.max_length for text in texts], dtype=np.bool_)
        return TokenEmbeddingOutput(embeddings=ragged, truncated=long, usage=Usage(prompt_tokens=0))

    def token_spans(self, texts: Sequence[str], *, role: Role | None = None) -> list[TokenSpans]:
        """The words whose rows :meth:`token_embed` returns, and where they are.

        Args:
            texts: A list of texts.
            role: ``"query"`` or ``"document"``, as in the call of :meth:`token_embed`.

        Returns:
            For each text its tokens and ``offsets [rows, 2]``.
        """
        spans = []
        for text in texts:
            places = [(0, 0), *(match.span() for match in _WORD.finditer(text))][: self.spec.max_length + 1]
            offsets = np.array(places, dtype=np.int32)
            spans.append(TokenSpans(tokens=tuple(self._tokens(text, role)), offsets=offsets))
        return spans

    def submit(self, task: str, inputs: Sequence[Any], params: Any = None) -> Any:
        """The output of ``embed`` or ``token_embed``, at once.

        Args:
            task: ``"embed"`` or ``"token_embed"``.
            inputs: Texts.
            params: Ignored.

        Returns:
            The task's output.
        """
        return self.embed(inputs) if task == "embed" else self.token_embed(inputs)

    def _tokens(self, text: str, role: Role | None) -> list[str]:
        return [f"[{role}]", *self._words(text)]

    def _words(self, text: str) -> list[str]:
        return _WORD.findall(text)[: self.spec.max_length]

    def _row(self, word: str) -> npt.NDArray[np.float64]:
        """The direction of a word, ``[d]``; a query's marker is a document's, but for a little."""
        seed = zlib.crc32(f"{self._name} {word.lower()}".encode("utf-8", "surrogatepass"))
        row = np.random.default_rng(seed).standard_normal(self.spec.dimensions)
        return np.asarray(row / np.linalg.norm(row))
