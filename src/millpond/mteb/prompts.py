"""What is put before the texts of a task, as mteb's wrappers of sentence-transformers choose it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from mteb.models.abs_encoder import get_prompt_name
from mteb.models.instruct_wrapper import InstructSentenceTransformerModel
from mteb.models.model_implementations import MODEL_REGISTRY
from mteb.models.sentence_transformer_wrapper import SentenceTransformerEncoderWrapper

from millpond.values.spec import ModelSpec

logger = logging.getLogger(__name__)

# The options of MillpondEncoder that mteb's list of models may have.
_INSTRUCTED = ("instruction_template", "apply_instruction_to_passages", "prompts_dict", "prompt_priority")
_CHOSEN = {SentenceTransformerEncoderWrapper: ("model_prompts",), InstructSentenceTransformerModel: _INSTRUCTED}
# Other options of theirs that say how the model is loaded, which the engine decides.
_LOADING = frozenset("model_kwargs trust_remote_code padding_side max_seq_length config_kwargs".split())


def task_prompt(spec: ModelSpec, model_prompts: Mapping[str, str] | None, task_metadata: Any, prompt_type: Any) -> str:
    """The prompt by the name of the task, its type or the role, as ``SentenceTransformerEncoderWrapper`` finds it.

    sentence-transformers gives every model an empty prompt for queries and one for documents, which the files replace;
    prompts of the caller's replace all of them.
    """
    named = dict(model_prompts) if model_prompts else {"query": "", "document": "", **spec.prompts}
    name = get_prompt_name(named, task_metadata, prompt_type)
    return named[name] if name is not None else named.get(spec.default_prompt_name or "", "")


def listed_options(spec: ModelSpec) -> dict[str, Any]:
    """The options of ``MillpondEncoder`` with which mteb's own list of models loads this one; others are warned of."""
    meta = MODEL_REGISTRY.get(spec.name)
    if meta is None or meta.loader is None:
        return {}
    options = dict(meta.loader_kwargs)
    chosen = _CHOSEN.get(meta.loader)
    if chosen is None:
        loader = getattr(meta.loader, "__name__", repr(meta.loader))
        logger.warning(
            "mteb loads %s by %s, whose prompts millpond does not know; those of its files are used", spec.name, loader
        )
        return {}
    if other := sorted(options.keys() - set(chosen) - _LOADING):
        logger.warning("mteb loads %s with %s, which millpond leaves out", spec.name, ", ".join(other))
    length = options.get("max_seq_length")
    if length is not None and length != spec.max_length:
        logger.warning(
            "mteb reads %s tokens of a text by %s, and this engine %d; --engine max_length=%s reads as many",
            *(length, spec.name, spec.max_length, length),
        )
    return {name: value for name, value in options.items() if name in chosen}
