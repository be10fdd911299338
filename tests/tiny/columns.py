"""A checkpoint of any family for each column of the table of tasks in docs/models.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tests.tiny.checkpoints import write_checkpoint
from tests.tiny.families import FAMILIES
from tests.tiny.heads import headed, write_language_model, write_pylate, write_splade, write_stanford

from millpond.checkpoints.architecture import Architecture
from millpond.checkpoints.architectures import find
from millpond.checkpoints.classifier_steps import FamilyStep, Linear, Norm

WIDTH = 48
TOKENS = ["<no>", "<yes>"]
# What precedes the backbone's tensors in the files of a family with a head, if it is not what transformers writes.
_PREFIXES = {
    "gte": "new.",
    "gte-en": "new.",
    "gte-snowflake": "gte.",
    "gpt2": "transformer.",
    "jina": "",
    "nomic": "bert.",
    "nomic-moe": "bert.",
}
_PLAIN_JINA = {"lora_adaptations": None, "matryoshka_dimensions": None}  # no adapters beside a head


def row_of(family: str) -> Architecture:
    """The architecture of a tiny family."""
    return find({"architectures": [FAMILIES[family].claimed(wrapped=False)], **FAMILIES[family].config}, family)


def writer(family: str, column: str) -> Callable[[Path], Path]:
    """A writer of a family's checkpoint for a column."""
    row, config = row_of(family), _PLAIN_JINA if family == "jina" else {}
    head = row.classifiers
    if column == "late interaction":
        # Gemma's tokenizer has no mask token to expand a query with.
        settings = {} if row.half == "float16" else {"do_query_expansion": False}
        return partial(write_stanford, family="jina") if config else partial(write_pylate, family=family, **settings)
    writers: Mapping[str, Callable[[Path], Path]] = {
        "embedder": partial(write_checkpoint, family=family),
        "classifier": _headed(family, "ForSequenceClassification", head.sequence, 3),
        "cross-encoder": _headed(family, "ForSequenceClassification", head.sequence, 1),
        "token classifier": _headed(family, "ForTokenClassification", head.tokens, 3),
        "reward model": _headed(family, "ForRewardModel", row.reward_head, 1),
        "LLM reranker": partial(write_language_model, family=family, tokens=TOKENS, config=config),
        "SPLADE": partial(write_splade, family=family, config=config),
    }
    return writers[column]


def options(column: str) -> dict[str, Any]:
    """The options of an engine that a column's checkpoints need."""
    return {"hf_overrides": {"classifier_from_token": TOKENS}} if column == "LLM reranker" else {}


def _headed(family: str, ending: str, steps: tuple[FamilyStep, ...], labels: int) -> Callable[[Path], Path]:
    """A writer of a checkpoint with a head of these steps."""
    row = row_of(family)
    # What the originals call a reward model of their own, other classes do not.
    prefix = FAMILIES[family].prefix if ending != "ForRewardModel" else row.prefix
    linears = [step.name for step in steps if isinstance(step, Linear)]
    shapes: dict[str, tuple[int, ...]] = {}
    for step in steps:
        if isinstance(step, Norm):
            shapes[f"{step.name}.weight"] = (WIDTH,)
        elif isinstance(step, Linear):
            rows = labels if step.name == linears[-1] else WIDTH
            shapes[f"{step.name}.weight"] = (rows, WIDTH)
            if step.biased:
                shapes[f"{step.name}.bias"] = (rows,)
    return headed(
        family,
        _PLAIN_JINA if family == "jina" else {},
        prefix + ending,
        shapes,
        prefix=_PREFIXES.get(family, f"{row.tensor_prefix}."),
        config={"id2label": {str(index): f"level_{index}" for index in range(labels)}},
    )
