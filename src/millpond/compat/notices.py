"""What an adapter logs once per process: where its vectors differ from those of the class that it replaces."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from millpond.compat.prompts import AUTO, PromptOptions, ReplacedClass, replaced_prompt
from millpond.tasks import ROLES, Role, ScoreMethod
from millpond.values.spec import ModelSpec

logger = logging.getLogger(__name__)

# A dict, whose setdefault() is atomic: a lock could be held by another thread when the process is forked.
_logged: dict[str, object] = {}

_NORMALIZED = {True: "normalized", False: "not normalized"}
_PLURALS: dict[Role, str] = {"query": "queries", "document": "documents"}


def log_once(message: str) -> None:
    """Log a warning, unless this process has logged it already."""
    mine = object()
    if _logged.setdefault(message, mine) is mine:
        logger.warning("%s", message)


def log_rerank_method(spec: ModelSpec, method: ScoreMethod) -> None:
    """Log once for each checkpoint that ``auto`` is MaxSim, if it was trained to embed and not to rerank."""
    if method == "auto" and spec.score_type == "bi-encoder":
        log_once(
            f"{spec.name} was trained to embed, not to rerank: its pairs are scored by MaxSim of their token vectors, "
            'at most one for each token of the query. Write method="maxsim" for these scores without this notice, '
            'method="cosine" for the similarity that its vectors were trained for, or name a cross-encoder'
        )


def log_prompt_notice(
    spec: ModelSpec,
    prompts: Mapping[Role, PromptOptions],
    *,
    normalize: bool | None,
    pooling: str | None,
    replaced: ReplacedClass,
) -> None:
    """Log once where vectors differ from the replaced class's, unless the caller has set the options that differ."""
    differ: list[str] = []
    keep: list[str] = []  # the options that keep the old vectors
    stay: list[str] = []  # those that keep the new ones, without this notice
    for role in ROLES:
        if prompts[role] == PromptOptions():
            old, new = replaced_prompt(spec, role, replaced), spec.role_prompt(role) or ""
            keep.append(f'{role}_prompt="{_escaped(old)}"')
            if old != new:
                differ.append(f"{_PLURALS[role]} get {_named(new)} ({replaced}: {_named(old)})")
                stay.append(f'{role}_prompt="{AUTO if new else ""}"')
    # How sentence-transformers pools a checkpoint whose files do not say it.
    bare = ("lasttoken",) if spec.architecture.endswith("ForCausalLM") else ("mean",)
    if pooling is None and not spec.has_modules and bare != spec.pooling:
        ours, theirs = "+".join(spec.pooling), "+".join(bare)
        differ.append(f'the pooling is "{ours}", as there is no modules.json ({replaced}: "{theirs}")')
        keep.append(f'pooling="{theirs}"')
        stay.append(f'pooling="{ours}"')
    # HuggingFaceEmbedding normalizes by default, and with normalize=False leaves the checkpoint's modules as they are;
    # HuggingFaceEmbeddings leaves it to the modules.
    by_modules = spec.has_modules and spec.normalize
    normalized = by_modules or (replaced == "HuggingFaceEmbedding" and normalize is None)
    if normalize is None and normalized != spec.normalize:
        differ.append(f"vectors are {_NORMALIZED[spec.normalize]} ({replaced}: {_NORMALIZED[normalized]})")
        keep.append(f"normalize={normalized}")
        stay.append(f"normalize={spec.normalize}")
    if normalize is False and replaced == "HuggingFaceEmbedding" and by_modules:
        differ.append(f"vectors are not normalized ({replaced}: normalized by modules.json, in spite of the option)")
        keep.append("normalize=True")
    if differ:
        log_once(
            f"{spec.name}: {', '.join(differ)}; so vectors differ from those of an index built with {replaced}. "
            f'To keep its vectors: {", ".join(keep)}, dtype="float32"'
            + (f". To keep these, without this notice: {', '.join(stay)}" if stay else "")
        )


def _named(prompt: str) -> str:
    return f'the prompt "{_escaped(prompt)}"' if prompt else "no prompt"


def _escaped(prompt: str) -> str:
    """As in Python source between double quotes, in one line."""
    return prompt.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
