"""Reranking language models, text pairs, and reference scores by transformers.

Prompts are copied from the model cards; reference logits are computed for the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.tiny import SENTENCES
from tests.tiny.checkpoints import token_id
from tests.tiny.heads import write_language_model

from millpond import Engine

LONG = 512  # tokens; enough for a reranker's template with these small vocabularies
PAIRS = (
    ("How deep is it?", "The wheel."),
    (SENTENCES[10], SENTENCES[1]),
    (SENTENCES[10], SENTENCES[8]),
    ("a", "b"),
    ("Who wrote the level in a book?", SENTENCES[8] + " " + SENTENCES[9]),
    ("Ein Teich, une étang, 池。", "A pond."),
)
QUERIES, DOCUMENTS = ([pair[side] for pair in PAIRS] for side in (0, 1))
CHAT = ("<|im_start|>", "<|im_end|>")
FRAME = (
    "Is it in there? {{ (messages | selectattr('role', 'eq', 'query') | first).content }} "
    "{{ (messages | selectattr('role', 'eq', 'document') | first).content }} The answer:"
)


def qwen3(query: str, document: str) -> str:
    return qwen3_prompt("Given a web search query, retrieve relevant passages that answer the query", query, document)


def qwen3_prompt(instruction: str, query: str, document: str) -> str:
    return (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: '
        f"{instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def mxbai(query: str, document: str) -> str:
    return (
        "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        f"<|im_start|>user\nquery: {query}\ndocument: {document}\nYou are a search relevance expert who evaluates how "
        "well documents match search queries. For each query-document pair, carefully analyze the semantic "
        "relationship between them, then provide your binary relevance judgment (0 for not relevant, 1 for relevant)."
        "\nRelevance:<|im_end|>\n<|im_start|>assistant\n"
    )


def bge_gemma(query: str, document: str) -> str:
    return (
        f"A: {query}\nB: {document}\nGiven a query A and a passage B, determine whether the passage contains an answer "
        "to the query by providing a prediction of either 'Yes' or 'No'."
    )


def nemotron(query: str, document: str) -> str:
    return f"question:{query} \n \n passage:{document}"


def zerank(query: str, document: str) -> str:
    return (
        f"<|im_start|>system\n{query.strip()}<|im_end|>\n<|im_start|>user\n{document.strip()}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def ctxl(query: str, document: str) -> str:
    return (
        "Check whether a given document contains information helpful to answer the query.\n"
        f"<Document> {document}\n<Query> {query} ??"
    )


def together(query: str, document: str) -> str:
    return query + document


def framed(query: str, document: str) -> str:
    return f"Is it in there? {query} {document} The answer:"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A reranking language model: its name on the hub is ``called``, its ``tokens`` are (false, true) or (true,)."""

    called: str
    family: str
    text: Callable[[str, str], str]
    tokens: tuple[str | int, ...]
    added: tuple[str, ...] = CHAT
    template: str | None = "$A"  # of the tokenizer
    raw: bool = False
    divisor: float = 1.0


QWEN3 = Row(called="Qwen3-Reranker-0.6B", family="qwen3", text=qwen3, tokens=("no", "yes"), added=(*CHAT, "no", "yes"))
MXBAI = Row(called="mxbai-rerank-base-v2", family="qwen2", text=mxbai, tokens=("0", "1"))
GEMMA = Row(
    called="bge-reranker-v2-gemma",
    family="gemma",
    text=bge_gemma,
    tokens=("Yes",),
    added=("Yes",),
    template=None,
    raw=True,
)
ZERANK = Row(
    called="zerank-2", family="qwen3", text=zerank, tokens=("Yes",), added=(*CHAT, "Yes", "yes", "no"), divisor=5.0
)
CTXL, CTXL_6B = (
    Row(
        called=f"ctxl-rerank-v2-instruct-multilingual-{size}",
        family=family,
        text=ctxl,
        tokens=(0,),
        added=(),
        template=template,
        raw=True,
    )
    for size, family, template in (("1b", "qwen3", "$A"), ("6b", "mistral", None))
)
MODELS = (QWEN3, MXBAI, GEMMA, ZERANK, CTXL, CTXL_6B)


def write(folder: Path, row: Row) -> Path:
    return write_language_model(
        folder,
        row.family,
        row.added,
        tokenizer_limit=LONG,
        config={"max_position_embeddings": LONG},
        template=row.template,
    )


def load(folder: Path, **options: Any) -> Engine:
    return Engine(folder, dtype="float32", device="cpu", **options)


def tokenized(folder: Path, *texts: Any) -> dict[str, torch.Tensor]:
    """A text or a pair, tokenized by transformers; all tensors are ``[n]``."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    rows: dict[str, torch.Tensor] = dict(tokenizer(*([text] for text in texts), return_tensors="pt"))
    return {key: value[0] for key, value in rows.items()}


def vocabulary(folder: Path, many: Sequence[torch.Tensor]) -> torch.Tensor:  # [n, vocabulary]
    """The logits of each text's last token, over the whole vocabulary."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32, local_files_only=True
    ).eval()
    with torch.inference_mode():
        return torch.stack([model(input_ids=ids[None]).logits[0, -1] for ids in many])


def answers(folder: Path, row: Row, many: Sequence[torch.Tensor]) -> np.ndarray:  # [n]
    """The row's raw scores of token ids."""
    logits = vocabulary(folder, many)
    ids = [token if isinstance(token, int) else token_id(folder, token) for token in row.tokens]
    actual = logits[:, ids[-1]] - (logits[:, ids[0]] if len(ids) == 2 else 0)
    return (actual / row.divisor).numpy()


def expected_of(folder: Path, row: Row, text: Callable[[str, str], str]) -> np.ndarray:
    return answers(folder, row, [tokenized(folder, text(*pair))["input_ids"] for pair in PAIRS])


def scores(engine: Engine, **options: Any) -> np.ndarray:
    return engine.score(QUERIES, DOCUMENTS, **{"activation": False, **options}).scores


def difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, relative to the largest score."""
    assert actual.shape == expected.shape
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def sigmoid(scores: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-scores))
