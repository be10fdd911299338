"""The options of LlamaIndex's own classes, as those of millpond's adapters.

What sentence-transformers takes is translated by :mod:`millpond.compat.sentence_transformers_options`; here are the
options that only LlamaIndex's classes have: ``HuggingFaceEmbedding`` (0.8.0), ``FastEmbedEmbedding`` (0.7.0),
``SentenceTransformerRerank`` (0.14.25), ``ColbertRerank`` and ``FlagEmbeddingReranker`` (0.6.0).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from millpond.compat.option_translation import OptionTranslation, Rule, flag, ignore, only, positive, refuse
from millpond.compat.sentence_transformers_options import translate_embedding_options, translate_scoring_options

# What HuggingFaceEmbedding has as the default of options that it no longer takes.
_NOT_PASSED = "deprecated"
_TOKENIZER = refuse(
    "the tokenizer is that of the checkpoint", "leave it out, or save the tokenizer into the folder of the checkpoint"
)


def replaced_embedding_options(options: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """The options of an embedding adapter, with those of ``HuggingFaceEmbedding`` and its like translated.

    Args:
        options: What the caller passed; not changed.
        own: The adapter's own options, aliases included.

    Raises:
        InvalidRequestError: An option that would change vectors and is not available.
    """
    passed = {name: value for name, value in options.items() if not _is_not_passed(value)}
    return translate_embedding_options(_translated(passed, _EMBEDDING), own=own, replaced="HuggingFaceEmbedding")


def replaced_rerank_options(options: Mapping[str, Any], own: Collection[str]) -> dict[str, Any]:
    """As :func:`replaced_embedding_options`, for ``SentenceTransformerRerank`` and its like."""
    return translate_scoring_options(_translated(options, _RERANK), own=own)


def _translated(options: Mapping[str, Any], rules: Mapping[str, Rule]) -> dict[str, Any]:
    translation = OptionTranslation(options, ())
    translation.top_level(rules)
    return translation.result


def _is_not_passed(value: object) -> bool:
    return isinstance(value, str) and value == _NOT_PASSED


def _use_fp16(translation: OptionTranslation, source: str, value: Any) -> None:
    # True is half precision on a GPU only, in FlagEmbedding as here by default.
    if not flag(source, value):
        translation.set("dtype", "float32", source)


def _doc_embed_type(translation: OptionTranslation, source: str, value: Any) -> None:
    only(
        "default",
        "passage",
        reason="it chooses what is put before a document",
        line='write document_prompt="..." instead',
    )(translation, source, value)
    if value == "default":  # without a prompt, also where the checkpoint has one
        translation.set("document_prompt", "", source)


def _colbert_tokenizer(translation: OptionTranslation, source: str, value: Any) -> None:
    if value != translation.model:
        _TOKENIZER(translation, source, value)


def _keep_retrieval_score(translation: OptionTranslation, source: str, value: Any) -> None:
    translation.result["keep_retrieval_score"] = value  # None, which ColbertRerank takes for False, does not come here


_EMBEDDING: dict[str, Rule] = {
    "tokenizer_name": _TOKENIZER,
    "tokenizer": _TOKENIZER,
    # HuggingFaceEmbedding chooses its prompts by names of its own.
    "default_prompt_name": ignore,
    "threads": positive,
    "doc_embed_type": _doc_embed_type,
    "providers": refuse(
        "models run by torch and millpond's own kernels", 'write device="cuda" or device="cpu" instead'
    ),
}
_RERANK: dict[str, Rule] = {
    "tokenizer": _colbert_tokenizer,
    "use_fp16": _use_fp16,
    "keep_retrieval_score": _keep_retrieval_score,
}
