"""The options of sentence-transformers, and of the classes over it in LangChain and LlamaIndex, as millpond's.

A line that built ``HuggingFaceEmbeddings``, ``HuggingFaceEmbedding``, ``HuggingFaceCrossEncoder``,
``SentenceTransformerRerank`` and the like builds millpond's adapter, too: what has an equal meaning is translated, a
hint about resources is accepted and changes nothing, and what would change vectors or scores and is not available is
refused, with the line to write instead. Names that neither side knows are left alone, for the adapter to refuse.

Read from the sources of sentence-transformers 6.2.0, langchain-huggingface 1.2.3, langchain-community 0.4.2,
llama-index-core 0.14.25 and llama-index-embeddings-huggingface 0.8.0. Importing this module imports neither torch nor
pydantic.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from typing import Any

from millpond.compat.notices import log_once
from millpond.compat.option_translation import (
    OptionTranslation,
    Rule,
    device_text,
    flag,
    ignore,
    mapping,
    nested,
    only,
    positive,
    refuse,
    rename,
    text_option,
)
from millpond.compat.role_prompts import BGE_QUERY_PROMPTS, ReplacedClass
from millpond.compat.sentence_transformers_loading import FROM_PRETRAINED, LOADING, device, show_progress
from millpond.errors import InvalidRequestError
from millpond.tasks import ROLES, Role

logger = logging.getLogger(__name__)

# Names that sentence-transformers looks up under an owner of its own, if they are written without one.
_EMBEDDING_NAMES = re.compile(r"(all|multi-qa|paraphrase|msmarco|distiluse|stsb|nli)-.+|LaBSE")
_SCORING_NAMES = re.compile(r"(ms-marco|mmarco|stsb|nli|qnli|quora)-.+")
_HIDDEN = "**********"
_SECRETS = frozenset("token use_auth_token hf_token auth_token api_key huggingfacehub_api_token".split())


def translate_embedding_options(
    options: Mapping[str, Any], *, own: Collection[str], replaced: ReplacedClass
) -> dict[str, Any]:
    """The arguments of an embedding adapter, with those of the classes that it replaces translated.

    Args:
        options: What the caller passed; not changed.
        own: The adapter's own options, aliases included. An option of the same name is the adapter's.
        replaced: The class that the adapter replaces.

    Returns:
        Options of ``own``; the names that nobody knows; and, translated: ``model``, ``revision``, ``device``,
        ``dtype``, ``max_length``, ``hf_overrides``, ``truncate``, ``dimensions``, ``normalize``, ``query_prompt``,
        ``document_prompt``, ``query_prompt_name``, ``document_prompt_name`` and, if it is in ``own``,
        ``show_progress``.

    Raises:
        InvalidRequestError: An option that would change vectors and is not available, or two that contradict each
            other.
    """
    translation = _EmbeddingTranslation(options, own, replaced)
    translation.top_level(_EMBEDDING | LOADING)
    translation.encoding()
    translation.add_owner(_EMBEDDING_NAMES, "sentence-transformers")
    return translation.result


def translate_loading_options(options: Mapping[str, Any], *, own: Collection[str]) -> dict[str, Any]:
    """As :func:`translate_embedding_options`, for an adapter that only loads a model as those classes do.

    Returns:
        As there, but of what is translated only ``model``, ``revision``, ``device``, ``dtype``, ``max_length``,
        ``hf_overrides`` and ``truncate``.
    """
    translation = OptionTranslation(options, own)
    translation.top_level({**LOADING, "model_kwargs": nested({**LOADING, "model_kwargs": nested(FROM_PRETRAINED)})})
    return translation.result


def translate_scoring_options(options: Mapping[str, Any], *, own: Collection[str]) -> dict[str, Any]:
    """As :func:`translate_embedding_options`, for an adapter that scores pairs.

    Returns:
        As there, but of what is translated only ``model``, ``revision``, ``device``, ``dtype``, ``max_length``,
        ``hf_overrides``, ``truncate`` and ``activation``.
    """
    translation = OptionTranslation(options, own)
    translation.top_level(_SCORING | LOADING)
    translation.add_owner(_SCORING_NAMES, "cross-encoder")
    return translation.result


def hide_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same options with the values of tokens and keys hidden, also inside ``model_kwargs`` and the like.

    pydantic prints the input of a validator that fails. So this runs in a validator of its own, before the one that
    translates.
    """
    return {
        name: _HIDDEN
        if name in _SECRETS and isinstance(value, str)
        else hide_secrets(value)
        if name.endswith(("kwargs", "args")) and isinstance(value, Mapping)
        else value
        for name, value in options.items()
    }


class _EmbeddingTranslation(OptionTranslation):
    """The options of an embedding adapter, as they are translated.

    Attributes:
        replaced: The class that the adapter replaces.
        prompts: The prompts of ``model_kwargs``.
        default_prompt_name: That of ``model_kwargs``.
        documents: ``encode_kwargs``.
        queries: ``query_encode_kwargs``.
        multi_process: Whether the replaced class ignored ``encode_kwargs``.
    """

    def __init__(self, options: Mapping[str, Any], own: Collection[str], replaced: ReplacedClass) -> None:
        super().__init__(options, own)
        self.replaced = replaced
        self.prompts: dict[str, str] = {}
        self.default_prompt_name: str | None = None
        self.documents: dict[str, Any] = {}
        self.queries: dict[str, Any] = {}
        self.multi_process = False

    def encoding(self) -> None:
        """Read ``encode_kwargs`` and ``query_encode_kwargs``, which replaces it for queries unless it is empty."""
        roles: dict[Role, tuple[str, dict[str, Any]]] = {
            "document": ("encode_kwargs", self.documents),
            "query": ("query_encode_kwargs", self.queries) if self.queries else ("encode_kwargs", self.documents),
        }
        for where, passed in dict(roles.values()).items():
            self.nested(where, passed, _ENCODING)
        if self.multi_process:
            self._check_multi_process(roles)
        self._tasks()
        for role, (where, passed) in roles.items():
            self._prompt(role, where, passed)
        self._partial_prompts()
        self._unused_prompts()
        self._normalize()

    def _check_multi_process(self, roles: Mapping[Role, tuple[str, dict[str, Any]]]) -> None:
        for where, passed in roles.values():
            for name in ("normalize_embeddings", "prompt", "prompt_name", "truncate_dim"):
                if passed.get(name):
                    raise InvalidRequestError(
                        f"{where}[{name!r}] was ignored by HuggingFaceEmbeddings with multi_process=True: leave it out "
                        "to keep the vectors of an existing index, or leave multi_process out to apply it"
                    )

    def _tasks(self) -> None:
        """The adapters of jina-embeddings-v3, which the roles choose here."""
        tasks = (self.documents.get("task"), self.queries.get("task") if self.queries else self.documents.get("task"))
        if tasks not in ((None, None), ("retrieval.passage", "retrieval.query")):
            raise InvalidRequestError(
                f"the task is {tasks[0]!r} for documents and {tasks[1]!r} for queries: here it is 'retrieval.passage' "
                "and 'retrieval.query' by themselves; leave it out, or write Engine(...).embed(texts, adapter=...)"
            )

    def _prompt(self, role: Role, where: str, passed: Mapping[str, Any]) -> None:
        """The prompt of one role, chosen as ``SentenceTransformer.encode`` chooses it."""
        for kind in _PROMPT_KINDS:
            if not isinstance(passed.get(kind), str | None):
                raise InvalidRequestError(
                    f"{where}[{kind!r}]={passed[kind]!r} must be a str; write {role}_{kind}= instead"
                )
        if passed.get("prompt") is not None:
            self.set(f"{role}_prompt", passed["prompt"], f"{where}['prompt']")
            return
        source, name = f"{where}['prompt_name']", passed.get("prompt_name")
        if name is None:
            source, name = "model_kwargs['default_prompt_name']", self.default_prompt_name
        if name in self.prompts:
            self.set(f"{role}_prompt", self.prompts[name], source)
        elif name is not None:
            self.set(f"{role}_prompt_name", name, source)

    def _partial_prompts(self) -> None:
        """A role without a prompt, beside one that has one, gets what the replaced class gave it."""
        if self.options.get("query_instruction") is not None and not self._has_prompt("document"):
            self.set("document_prompt", "", "the prompt of documents")
        chosen = any(
            passed.get(kind) is not None for passed in (self.documents, self.queries) for kind in _PROMPT_KINDS
        )
        if chosen or self.default_prompt_name is not None:
            for role in ROLES:
                if not self._has_prompt(role):
                    self.set(f"{role}_prompt_name", "", f"the prompt of a {role}")
        for role in ROLES:
            both = [f"{role}_{kind}" for kind in _PROMPT_KINDS if self.result.get(f"{role}_{kind}") is not None]
            if len(both) == 2:
                first, second = (f"{name}={self.result[name]!r}" for name in both)
                raise InvalidRequestError(f"{first} and {second} contradict each other; pass one of them")

    def _has_prompt(self, role: Role) -> bool:
        return any(self.result.get(f"{role}_{kind}") is not None for kind in _PROMPT_KINDS)

    def _unused_prompts(self) -> None:
        """``prompts`` that nothing selects were never applied, so their meaning is the caller's to say."""
        if not self.prompts or any(self._has_prompt(role) for role in ROLES):
            return
        lines = ", ".join(
            f"{role}_prompt={next((self.prompts[name] for name in names if name in self.prompts), '')!r}"
            for role, names in _PROMPT_NAMES.items()
        )
        none = 'query_prompt="", document_prompt=""'
        raise InvalidRequestError(
            f"model_kwargs['prompts']={self.prompts!r} was never applied: encode() uses a prompt by prompt_name or "
            f"default_prompt_name only. Write {lines} to apply it, or {none} to keep the vectors of an existing index"
        )

    def _normalize(self) -> None:
        """``normalize_embeddings=True`` normalizes; ``False``, its default, leaves it to the checkpoint's modules."""
        documents = self.documents.get("normalize_embeddings")
        queries = self.queries.get("normalize_embeddings") if self.queries else documents
        if documents:
            self.set("normalize", True, "encode_kwargs['normalize_embeddings']")
        if bool(documents) != bool(queries):
            log_once(
                logger,
                f"query_encode_kwargs replaces encode_kwargs, so normalize_embeddings is {bool(documents)} for "
                f"documents and {bool(queries)} for queries; here queries are normalized as documents are "
                f"({'normalize=True' if documents else 'as the checkpoint does'}), which finds the same documents",
            )
        if (
            self.is_translated("dimensions")
            and not self.result.get("normalize")
            and self.replaced == "HuggingFaceEmbeddings"
        ):
            log_once(
                logger,
                "truncate_dim without normalize_embeddings=True: if the checkpoint normalizes its vectors, cut vectors "
                "are normalized again here, and are not in sentence-transformers; their cosines are the same",
            )


_PROMPT_KINDS = ("prompt", "prompt_name")
_PROMPT_NAMES: dict[Role, tuple[str, ...]] = {
    "query": ("query",),
    "document": ("document", "passage", "corpus", "text"),
}


def _multi_process(translation: _EmbeddingTranslation, source: str, value: Any) -> None:
    translation.multi_process = flag(source, value)


def _parallel_process(translation: _EmbeddingTranslation, source: str, value: Any) -> None:
    devices = translation.options.get("target_devices")
    if flag(source, value) and devices is not None:
        translation.result["device"] = device_text(devices)  # device is only where the model is loaded first


def _prompts(translation: _EmbeddingTranslation, source: str, value: Any) -> None:
    prompts = mapping(source, value)
    if not all(isinstance(text, str | None) for text in prompts.values()):
        raise InvalidRequestError(f"{source}={value!r} must map names to texts")
    translation.prompts |= {name: text for name, text in prompts.items() if text is not None}


def _default_prompt_name(translation: _EmbeddingTranslation, source: str, value: Any) -> None:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{source}={value!r} must be the name of a prompt")
    translation.default_prompt_name = value


def _normalize_embeddings(translation: _EmbeddingTranslation, source: str, value: Any) -> None:
    if flag(source, value):  # False leaves it to the checkpoint
        translation.set("normalize", True, source)


def _encode_kwargs(translation: _EmbeddingTranslation, source: str, value: Any) -> None:
    translation.documents = dict(mapping(source, value))


def _query_encode_kwargs(translation: _EmbeddingTranslation, source: str, value: Any) -> None:
    translation.queries = dict(mapping(source, value))


def _check_flag(translation: OptionTranslation, source: str, value: Any) -> None:
    flag(source, value)


def _activation(translation: OptionTranslation, source: str, value: Any) -> None:
    path = value if isinstance(value, str) else (value if isinstance(value, type) else type(value)).__name__
    name = path.rsplit(".", 1)[-1].lower()
    if name not in ("identity", "sigmoid", "softmax"):
        refuse("scores can be left as they are, or pass a sigmoid or a softmax", 'write activation="sigmoid" instead')(
            translation, source, value
        )
    translation.set("activation", name, source)


def _query_instruction(translation: _EmbeddingTranslation, source: str, value: Any) -> None:
    known = BGE_QUERY_PROMPTS.get(translation.model or "")
    if value == "" and translation.replaced == "HuggingFaceEmbedding" and known:
        raise InvalidRequestError(
            f'query_instruction="" was no way to switch a prompt off: HuggingFaceEmbedding put its own before queries '
            f'of {translation.model}. Write query_prompt="{known}" to keep it, or query_prompt="" for none'
        )
    text_option("query_prompt")(translation, source, value)


_EMBEDDING_MODEL: dict[str, Rule] = {
    **LOADING,
    "model_kwargs": nested(FROM_PRETRAINED),
    "prompts": _prompts,
    "default_prompt_name": _default_prompt_name,
    "truncate_dim": rename("dimensions"),
    "similarity_fn_name": ignore,
}
_EMBEDDING: dict[str, Rule] = {
    **{
        name: _EMBEDDING_MODEL[name]
        for name in ("prompts", "default_prompt_name", "truncate_dim", "similarity_fn_name")
    },
    "model_kwargs": nested(_EMBEDDING_MODEL),
    "encode_kwargs": _encode_kwargs,
    "query_encode_kwargs": _query_encode_kwargs,
    "normalize_embeddings": _normalize_embeddings,
    "multi_process": _multi_process,
    "parallel_process": _parallel_process,
    "target_devices": ignore,  # parallel_process reads it
    "query_instruction": _query_instruction,
    "text_instruction": text_option("document_prompt"),
    "embed_instruction": text_option("document_prompt"),
}
_SCORER_MODEL: dict[str, Rule] = {
    **LOADING,
    "model_kwargs": nested(FROM_PRETRAINED),
    "automodel_args": nested(FROM_PRETRAINED),
    "num_labels": only(1, reason="a reranker has one score", line="leave it out"),
    "activation_fn": _activation,
    "default_activation_function": _activation,
    "prompts": refuse("an LLM reranker has one slot for an instruction", 'write instruction="..." instead'),
    "default_prompt_name": refuse("an LLM reranker has one slot for an instruction", 'write instruction="..." instead'),
    "keep_in_fp32_modules": refuse("a model has one dtype", 'write dtype="float32" instead'),
}
_SCORING: dict[str, Rule] = {
    **{name: _SCORER_MODEL[name] for name in ("num_labels", "activation_fn", "default_activation_function")},
    "model_kwargs": nested(_SCORER_MODEL),
    "automodel_args": nested(FROM_PRETRAINED),
    "cross_encoder_kwargs": nested(_SCORER_MODEL),
}
_FLOAT_VECTORS = "the frameworks take vectors of floats"
# SentenceTransformer.encode.
_ENCODING: dict[str, Rule] = {
    **dict.fromkeys(("prompt", "prompt_name", "task"), ignore),  # _EmbeddingTranslation reads them together
    "normalize_embeddings": _check_flag,
    "batch_size": positive,
    "chunk_size": positive,
    "show_progress_bar": show_progress,
    "convert_to_numpy": ignore,
    "convert_to_tensor": ignore,
    "device": device,
    "pool": ignore,
    "truncate_dim": rename("dimensions"),
    "precision": only(
        "float32", reason=_FLOAT_VECTORS, line='write Engine(...).embed(texts, output_dtype="int8") instead'
    ),
    "output_value": only(
        "sentence_embedding", reason=_FLOAT_VECTORS, line="write Engine(...).token_embed(texts) instead"
    ),
}
