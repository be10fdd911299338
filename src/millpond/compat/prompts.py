"""The prompts of an adapter that has a method for queries and one for documents, and those of the replaced classes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from millpond.errors import InvalidRequestError
from millpond.tasks import Role
from millpond.values.spec import ModelSpec

AUTO = "auto"
"""The prompt of the checkpoint for the role, else that of its model card."""

ReplacedClass = Literal[
    "HuggingFaceEmbeddings", "HuggingFaceBgeEmbeddings", "HuggingFaceInstructEmbeddings", "HuggingFaceEmbedding"
]
"""The class that an adapter replaces: LangChain's, or (the last one) LlamaIndex's."""

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
_SEARCH_RELEVANT = "Represent this sentence for searching relevant passages: "
_WEB_SEARCH = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
# Many checkpoints say only in their model card that they were trained with a prompt. A pattern of the model's name, the
# prompts of a query and of a document; behind it the card on huggingface.co that they were taken from.
CARDS: tuple[tuple[str, str, str], ...] = (
    (r"bge-(small|base|large)-en(-v1\.5)?", _SEARCH_RELEVANT, ""),  # BAAI/bge-base-en-v1.5
    (r"bge-(small|base|large)-zh(-v1\.5)?", BGE_QUERY_PROMPTS["BAAI/bge-base-zh"], ""),  # BAAI/bge-base-zh-v1.5
    (r"bge-m3", "", ""),  # BAAI/bge-m3
    (r"mxbai-embed-large-v1", _SEARCH_RELEVANT, ""),  # mixedbread-ai/mxbai-embed-large-v1
    (r"UAE-Large-V1", _SEARCH_RELEVANT, ""),  # WhereIsAI/UAE-Large-V1
    (r"snowflake-arctic-embed-(xs|s|m|m-long|l|m-v1\.5)", _SEARCH_RELEVANT, ""),  # Snowflake/snowflake-arctic-embed-m
    (r"snowflake-arctic-embed-(m|l)-v2\.0", "query: ", ""),  # Snowflake/snowflake-arctic-embed-l-v2.0
    (r"e5-(small|base|large)(-v2)?", "query: ", "passage: "),  # intfloat/e5-base-v2
    (r"multilingual-e5-(small|base|large)", "query: ", "passage: "),  # intfloat/multilingual-e5-base
    (r"multilingual-e5-large-instruct", _WEB_SEARCH, ""),  # intfloat/multilingual-e5-large-instruct
    (r"e5-mistral-7b-instruct", _WEB_SEARCH, ""),  # intfloat/e5-mistral-7b-instruct
    (r"nomic-embed-text-v(1|1\.5|2-moe)", "search_query: ", "search_document: "),  # nomic-ai/nomic-embed-text-v1.5
    (r"gte-(small|base|large)(-zh)?", "", ""),  # thenlper/gte-base
    (r"gte-(base|large)-en-v1\.5|gte-multilingual-base", "", ""),  # Alibaba-NLP/gte-base-en-v1.5
    (r"jina-embeddings-v2-(small|base)-(en|de|es|zh|code)", "", ""),  # jinaai/jina-embeddings-v2-base-en
    # sentence-transformers/all-MiniLM-L6-v2
    (r"all-(MiniLM-L(6|12)-v[12]|mpnet-base-v[12]|distilroberta-v1|roberta-large-v1)", "", ""),
    (r"multi-qa-(MiniLM-L6|mpnet-base|distilbert)-(cos|dot)-v1", "", ""),
    (r"paraphrase-(multilingual-)?(MiniLM-L\d+|mpnet-base)-v2", "", ""),
)


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """The options of an adapter for one role: a text or ``"auto"``, or the name of a prompt of the checkpoint."""

    text: str | None = None
    name: str | None = None


def role_prompt(spec: ModelSpec, role: Role, options: PromptOptions) -> str:
    """What is put before a text of a role; an error if it is ``"auto"`` or a name of which nothing is known."""
    if options.text == AUTO:
        declared = spec.role_prompt(role)
        prompt = declared or _card_prompt(spec.name, role)
        if prompt is None and declared is None:
            raise InvalidRequestError(
                f'{role}_prompt="auto": the files of {spec.name} have no prompt for a {role}, and its model card is '
                f'not among those known; write {role}_prompt="..." with the text of the model card, or '
                f'{role}_prompt="" for none'
            )
        return prompt or ""
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


def _card_prompt(model: str, role: Role) -> str | None:
    """What the model card puts before a text of a role; ``None`` if no card of that name is known."""
    for names, query, document in CARDS:
        if re.fullmatch(names, _short_name(model), re.IGNORECASE):
            return query if role == "query" else document
    return None


def _short_name(model: str) -> str:
    """The last part of a hub id or a path; in the hub's cache, that of the folder models--OWNER--NAME."""
    parts = [part for part in re.split(r"[/\\]", model) if part] or [""]
    return next((part.rsplit("--", 1)[-1] for part in reversed(parts) if part.startswith("models--")), parts[-1])


def default_prompt(spec: ModelSpec) -> str:
    """What ``SentenceTransformer.encode`` puts before a text without being told."""
    return spec.prompts.get(spec.default_prompt_name or "", "")


def replaced_prompt(spec: ModelSpec, role: Role, replaced: ReplacedClass) -> str:
    """What the replaced class put before a text of a role, if it was told nothing about prompts.

    ``HuggingFaceEmbeddings`` (langchain-huggingface 1.2.3) calls ``encode(texts)`` for documents and queries alike,
    which puts the checkpoint's default prompt before both, if it declares one, and never that of a role.
    ``HuggingFaceBgeEmbeddings`` (langchain-community 0.4.2) puts an instruction of its own behind it, before queries of
    every model, and ``HuggingFaceInstructEmbeddings`` one before queries and one before documents.
    ``HuggingFaceEmbedding`` (llama-index-embeddings-huggingface 0.8.0) replaces the checkpoint's prompts by its own,
    which are empty but for twelve names of BGE models and six of Instructor.
    """
    if replaced == "HuggingFaceEmbeddings":
        return default_prompt(spec)
    if replaced == "HuggingFaceBgeEmbeddings":
        return default_prompt(spec) + (bge_instruction(spec.name) if role == "query" else "")
    if replaced == "HuggingFaceInstructEmbeddings" or spec.name in _INSTRUCTOR_NAMES:
        return _INSTRUCTOR[role]
    return BGE_QUERY_PROMPTS.get(spec.name, "") if role == "query" else ""


def bge_instruction(model: str) -> str:
    """What ``HuggingFaceBgeEmbeddings`` puts before a query for any model, by its name or path."""
    return BGE_QUERY_PROMPTS["BAAI/bge-base-zh" if "-zh" in model else "BAAI/bge-base-en"]


def siblings(model: str, replaced: ReplacedClass) -> tuple[ReplacedClass, ...]:
    """Other classes of the framework that an adapter may replace, which were written for models of this name."""
    if replaced != "HuggingFaceEmbeddings":
        return ()
    name = _short_name(model).lower()
    if name.startswith("bge-"):
        return ("HuggingFaceBgeEmbeddings",)
    return ("HuggingFaceInstructEmbeddings",) if name.startswith("instructor-") else ()
