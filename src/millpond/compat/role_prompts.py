"""The prompts of an adapter that has a method for queries and one for documents.

An adapter has four options: ``query_prompt`` and ``document_prompt``, the texts, and ``query_prompt_name`` and
``document_prompt_name``, names of the checkpoint's prompts. :func:`role_prompt` says what they put before a text, and
:func:`log_prompt_notice` tells once where that differs from the class that the adapter replaces.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from millpond.compat.model_card_prompts import card_prompt
from millpond.compat.notices import log_once
from millpond.errors import InvalidRequestError
from millpond.spec import ModelSpec, PoolingMode
from millpond.tasks import ROLES, Role

logger = logging.getLogger(__name__)

AUTO = "auto"
"""The prompt of the checkpoint for the role, else that of its model card."""

ReplacedClass = Literal["HuggingFaceEmbeddings", "HuggingFaceEmbedding"]
"""The class that an adapter replaces: LangChain's, or LlamaIndex's."""

# The prompts that sentence-transformers gives every model; they are empty if the files do not set them.
_PREDEFINED = ("query", "document")
# llama_index.embeddings.huggingface.utils (0.8.0): the names for which HuggingFaceEmbedding has a prompt of its own.
BGE_QUERY_PROMPTS = {
    f"BAAI/bge-{size}-{language}{version}": prompt
    for language, prompt in (
        ("en", "Represent this question for searching relevant passages: "),
        ("zh", "为这个句子生成表示以用于检索相关文章："),  # noqa: RUF001
    )
    for size in ("small", "base", "large")
    for version in ("", "-v1.5")
}
_INSTRUCTOR_NAMES = {
    f"{owner}/instructor-{size}" for owner in ("hku-nlp", "hkunlp") for size in ("base", "large", "xl")
}
_INSTRUCTOR = {
    "query": "Represent the question for retrieving supporting documents: ",
    "document": "Represent the document for retrieval: ",
}


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """The prompt options of an adapter for one role.

    Attributes:
        text: Put before a text; ``"auto"``: the checkpoint's prompt for the role, else that of its model card.
        name: Name of one of the checkpoint's prompts, if ``text`` is ``None``; ``""``: its default prompt, if it
            declares one, which is what ``SentenceTransformer.encode`` puts before a text without being told.
    """

    text: str | None = None
    name: str | None = None


def role_prompt(spec: ModelSpec, role: Role, options: PromptOptions) -> str:
    """What is put before a text of a role.

    Raises:
        InvalidRequestError: The checkpoint has no prompt of this name; or ``"auto"``, and neither the checkpoint's
            files nor a known model card has a prompt.
    """
    if options.text == AUTO:
        return _auto_prompt(spec, role)
    if options.text is not None:
        return options.text
    if options.name is None:
        return spec.role_prompt(role) or ""
    if options.name == "":
        return spec.prompts.get(spec.default_prompt_name or "", "")
    if options.name in spec.prompts:
        return spec.prompts[options.name]
    if options.name in _PREDEFINED:
        return ""
    known = ", ".join(repr(name) for name in sorted(spec.prompts)) or "none"
    raise InvalidRequestError(
        f"{role}_prompt_name={options.name!r} is no prompt of {spec.name}, which has {known}; "
        f'write {role}_prompt="..." with the text instead'
    )


def _auto_prompt(spec: ModelSpec, role: Role) -> str:
    declared = spec.role_prompt(role)
    if declared:
        return declared
    card = card_prompt(spec.name, role)
    if card is not None:
        return card
    if declared is not None:
        return declared  # the files say that there is none
    raise InvalidRequestError(
        f'{role}_prompt="auto": the files of {spec.name} have no prompt for a {role}, and its model card is not among '
        f'those known; write {role}_prompt="..." with the text of the model card, or {role}_prompt="" for none'
    )


def replaced_prompt(spec: ModelSpec, role: Role, replaced: ReplacedClass) -> str:
    """What the replaced class put before a text of a role, if it was told nothing about prompts.

    ``HuggingFaceEmbeddings`` (langchain-huggingface 1.2.3) calls ``encode(texts)`` for documents and queries alike,
    which puts the checkpoint's default prompt before both, if it declares one, and never that of a role.
    ``HuggingFaceEmbedding`` (llama-index-embeddings-huggingface 0.8.0) replaces the checkpoint's prompts by its own,
    which are empty but for twelve names of BGE models and six of Instructor.
    """
    if replaced == "HuggingFaceEmbeddings":
        return spec.prompts.get(spec.default_prompt_name or "", "")
    if spec.name in _INSTRUCTOR_NAMES:
        return _INSTRUCTOR[role]
    return BGE_QUERY_PROMPTS.get(spec.name, "") if role == "query" else ""


def prompt_notice(
    spec: ModelSpec,
    *,
    query: PromptOptions,
    document: PromptOptions,
    normalize: bool | None,
    pooling: str | None = None,
    replaced: ReplacedClass,
) -> str | None:
    """One line that says where vectors differ from those of the replaced class, and how to keep the old ones.

    ``None`` if they are the same, or if the caller has set the options that differ, and so knows.

    Args:
        spec: The loaded checkpoint.
        query: The adapter's options for queries.
        document: Those for documents.
        normalize: The adapter's option; ``None`` is the checkpoint's own.
        pooling: The adapter's option; ``None`` is the checkpoint's own.
        replaced: The class that the adapter replaces.
    """
    options = {"query": query, "document": document}
    old = {role: replaced_prompt(spec, role, replaced) for role in ROLES}
    new = {role: spec.role_prompt(role) or "" for role in ROLES}
    changed = [role for role in ROLES if options[role] == PromptOptions() and old[role] != new[role]]
    differences = [f"{_PLURALS[role]} get {_named(new[role])} ({replaced}: {_named(old[role])})" for role in changed]
    keep = [f'{role}_prompt="{_escaped(old[role])}"' for role in ROLES if options[role] == PromptOptions()]
    stay = [f'{role}_prompt="{AUTO if new[role] else ""}"' for role in changed]
    old_pooling = spec.pooling if spec.has_modules else _bare_pooling(spec)
    if pooling is None and old_pooling != spec.pooling:
        ours, theirs = "+".join(spec.pooling), "+".join(old_pooling)
        differences.append(f'the pooling is "{ours}", as there is no modules.json ({replaced}: "{theirs}")')
        keep.append(f'pooling="{theirs}"')
        stay.append(f'pooling="{ours}"')
    # HuggingFaceEmbedding normalizes by default; HuggingFaceEmbeddings leaves it to the modules.
    normalized = replaced == "HuggingFaceEmbedding" or (spec.has_modules and spec.normalize)
    if normalize is None and normalized != spec.normalize:
        differences.append(f"vectors are {_NORMALIZED[spec.normalize]} ({replaced}: {_NORMALIZED[normalized]})")
        keep.append(f"normalize={normalized}")
        stay.append(f"normalize={spec.normalize}")
    if normalize is False and replaced == "HuggingFaceEmbedding" and spec.has_modules and spec.normalize:
        # HuggingFaceEmbedding's normalize=False leaves the checkpoint's modules as they are.
        differences.append(
            f"vectors are not normalized ({replaced}: normalized by modules.json, in spite of the option)"
        )
        keep.append("normalize=True")
    if not differences:
        return None
    line = (
        f"{spec.name}: {', '.join(differences)}; so vectors differ from those of an index built with {replaced}. "
        f'To keep its vectors: {", ".join(keep)}, dtype="float32"'
    )
    return f"{line}. To keep these, without this notice: {', '.join(stay)}" if stay else line


def _bare_pooling(spec: ModelSpec) -> tuple[PoolingMode, ...]:
    """How sentence-transformers pools a checkpoint whose files do not say it."""
    return ("lasttoken",) if spec.architecture.endswith("ForCausalLM") else ("mean",)


_NORMALIZED = {True: "normalized", False: "not normalized"}
_PLURALS: dict[Role, str] = {"query": "queries", "document": "documents"}


def _named(prompt: str) -> str:
    return f'the prompt "{_escaped(prompt)}"' if prompt else "no prompt"


def _escaped(prompt: str) -> str:
    """As in Python source between double quotes, in one line."""
    return prompt.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")


def log_prompt_notice(
    spec: ModelSpec,
    *,
    query: PromptOptions,
    document: PromptOptions,
    normalize: bool | None,
    pooling: str | None = None,
    replaced: ReplacedClass,
) -> None:
    """Log :func:`prompt_notice` as a warning, once per process and configuration."""
    notice = prompt_notice(
        spec, query=query, document=document, normalize=normalize, pooling=pooling, replaced=replaced
    )
    if notice is None:
        return
    log_once(logger, notice)
