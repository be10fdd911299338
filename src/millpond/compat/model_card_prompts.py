"""The prompts that model cards prescribe, for checkpoints whose files carry none.

Many checkpoints were trained with a prompt for queries and say so in their model card only. The comment above each row
is the card that it was taken from.
"""

from __future__ import annotations

import re

from millpond.tasks import Role

_SEARCH_RELEVANT = "Represent this sentence for searching relevant passages: "
_WEB_SEARCH = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "

# A pattern of the model's name (the last part of a hub id or folder), what is put before a query and before a document;
# "" is nothing.
CARDS: tuple[tuple[str, str, str], ...] = (
    # https://huggingface.co/BAAI/bge-base-en-v1.5
    (r"bge-(small|base|large)-en(-v1\.5)?", _SEARCH_RELEVANT, ""),
    # https://huggingface.co/BAAI/bge-base-zh-v1.5
    (r"bge-(small|base|large)-zh(-v1\.5)?", "为这个句子生成表示以用于检索相关文章：", ""),  # noqa: RUF001
    # https://huggingface.co/BAAI/bge-m3
    (r"bge-m3", "", ""),
    # https://huggingface.co/mixedbread-ai/mxbai-embed-large-v1
    (r"mxbai-embed-large-v1", _SEARCH_RELEVANT, ""),
    # https://huggingface.co/WhereIsAI/UAE-Large-V1
    (r"UAE-Large-V1", _SEARCH_RELEVANT, ""),
    # https://huggingface.co/Snowflake/snowflake-arctic-embed-m
    (r"snowflake-arctic-embed-(xs|s|m|m-long|l|m-v1\.5)", _SEARCH_RELEVANT, ""),
    # https://huggingface.co/Snowflake/snowflake-arctic-embed-l-v2.0
    (r"snowflake-arctic-embed-(m|l)-v2\.0", "query: ", ""),
    # https://huggingface.co/intfloat/e5-base-v2
    (r"e5-(small|base|large)(-v2)?", "query: ", "passage: "),
    # https://huggingface.co/intfloat/multilingual-e5-base
    (r"multilingual-e5-(small|base|large)", "query: ", "passage: "),
    # https://huggingface.co/intfloat/multilingual-e5-large-instruct
    (r"multilingual-e5-large-instruct", _WEB_SEARCH, ""),
    # https://huggingface.co/intfloat/e5-mistral-7b-instruct
    (r"e5-mistral-7b-instruct", _WEB_SEARCH, ""),
    # https://huggingface.co/nomic-ai/nomic-embed-text-v1.5
    (r"nomic-embed-text-v(1|1\.5)|nomic-embed-text-v2-moe", "search_query: ", "search_document: "),
    # https://huggingface.co/thenlper/gte-base
    (r"gte-(small|base|large)(-zh)?", "", ""),
    # https://huggingface.co/Alibaba-NLP/gte-base-en-v1.5
    (r"gte-(base|large)-en-v1\.5|gte-multilingual-base", "", ""),
    # https://huggingface.co/jinaai/jina-embeddings-v2-base-en
    (r"jina-embeddings-v2-(small|base)-(en|de|es|zh|code)", "", ""),
    # https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2
    (
        r"all-MiniLM-L(6|12)-v[12]|all-mpnet-base-v[12]|all-distilroberta-v1|all-roberta-large-v1"
        r"|multi-qa-(MiniLM-L6|mpnet-base|distilbert)-(cos|dot)-v1"
        r"|paraphrase-(multilingual-)?(MiniLM-L\d+|mpnet-base)-v2",
        "",
        "",
    ),
)


def card_prompt(model: str, role: Role) -> str | None:
    """What the model card puts before a text of a role; ``None`` if no card of that name is known.

    Args:
        model: Hub id or folder. Its last part is the name; in the hub's cache, the folder ``models--OWNER--NAME``.
        role: ``query`` or ``document``.
    """
    name = model_name(model)
    for names, query, document in CARDS:
        if re.fullmatch(names, name, re.IGNORECASE):
            return query if role == "query" else document
    return None


def model_name(model: str) -> str:
    """The name of a model without its owner or its folder's place."""
    parts = [part for part in re.split(r"[/\\]", model) if part]
    cached = next((part for part in reversed(parts) if part.startswith("models--")), None)
    if cached is not None:
        return cached.rsplit("--", 1)[-1]
    return parts[-1] if parts else ""
