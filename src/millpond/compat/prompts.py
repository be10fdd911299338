"""The prompts of an adapter that has a method for queries and one for documents, and those of the replaced classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from millpond.compat.model_card_prompts import card_prompt
from millpond.errors import InvalidRequestError
from millpond.tasks import Role
from millpond.values.spec import ModelSpec

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
        return default_prompt(spec)
    if options.name in spec.prompts:
        return spec.prompts[options.name]
    if options.name in _PREDEFINED:
        return ""
    known = ", ".join(repr(name) for name in sorted(spec.prompts)) or "none"
    raise InvalidRequestError(
        f"{role}_prompt_name={options.name!r} is unknown to {spec.name}, whose prompts are {known}; "
        f'write {role}_prompt="..." with the text instead'
    )


def _auto_prompt(spec: ModelSpec, role: Role) -> str:
    declared = spec.role_prompt(role)
    prompt = declared or card_prompt(spec.name, role)
    if prompt is None:
        prompt = declared  # "": the files say that there is none
    if prompt is None:
        raise InvalidRequestError(
            f'{role}_prompt="auto": the files of {spec.name} have no prompt for a {role}, and its model card is not '
            f'among those known; write {role}_prompt="..." with the text of the model card, or {role}_prompt="" for '
            "none"
        )
    return prompt


def default_prompt(spec: ModelSpec) -> str:
    """What ``SentenceTransformer.encode`` puts before a text without being told."""
    return spec.prompts.get(spec.default_prompt_name or "", "")


def replaced_prompt(spec: ModelSpec, role: Role, replaced: ReplacedClass) -> str:
    """What the replaced class put before a text of a role, if it was told nothing about prompts.

    ``HuggingFaceEmbeddings`` (langchain-huggingface 1.2.3) calls ``encode(texts)`` for documents and queries alike,
    which puts the checkpoint's default prompt before both, if it declares one, and never that of a role.
    ``HuggingFaceEmbedding`` (llama-index-embeddings-huggingface 0.8.0) replaces the checkpoint's prompts by its own,
    which are empty but for twelve names of BGE models and six of Instructor.
    """
    if replaced == "HuggingFaceEmbeddings":
        return default_prompt(spec)
    if spec.name in _INSTRUCTOR_NAMES:
        return _INSTRUCTOR[role]
    return BGE_QUERY_PROMPTS.get(spec.name, "") if role == "query" else ""
