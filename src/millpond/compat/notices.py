"""What an adapter logs once per process: where its vectors differ from those of the class that it replaces."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from millpond.compat.prompts import AUTO, PromptOptions, ReplacedClass, replaced_prompt
from millpond.tasks import ROLES, Role, ScoreMethod
from millpond.values.spec import ModelSpec, PoolingMode

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
    pooling: str | None = None,
    replaced: ReplacedClass,
) -> None:
    """Log :func:`prompt_notice` as a warning, once per process and configuration."""
    notice = prompt_notice(spec, prompts, normalize=normalize, pooling=pooling, replaced=replaced)
    if notice is not None:
        log_once(notice)


def prompt_notice(
    spec: ModelSpec,
    prompts: Mapping[Role, PromptOptions],
    *,
    normalize: bool | None,
    pooling: str | None = None,
    replaced: ReplacedClass,
) -> str | None:
    """One line that says where vectors differ from those of the replaced class, and how to keep the old ones.

    ``None`` if they are the same, or if the caller has set the options that differ, and so knows.

    Args:
        spec: The loaded checkpoint.
        prompts: The adapter's options for each role.
        normalize: The adapter's option; ``None`` is the checkpoint's own.
        pooling: The adapter's option; ``None`` is the checkpoint's own.
        replaced: The class that the adapter replaces.
    """
    notice = _Notice(replaced)
    unset: list[Role] = [role for role in ROLES if prompts[role] == PromptOptions()]
    for role in unset:
        old, new = replaced_prompt(spec, role, replaced), spec.role_prompt(role) or ""
        notice.keep.append(f'{role}_prompt="{_escaped(old)}"')
        if old != new:
            notice.differ(f"{_PLURALS[role]} get {_named(new)}", _named(old))
            notice.stay.append(f'{role}_prompt="{AUTO if new else ""}"')
    old_pooling = spec.pooling if spec.has_modules else _bare_pooling(spec)
    if pooling is None and old_pooling != spec.pooling:
        ours, theirs = "+".join(spec.pooling), "+".join(old_pooling)
        notice.differ(f'the pooling is "{ours}", as there is no modules.json', f'"{theirs}"')
        notice.keep.append(f'pooling="{theirs}"')
        notice.stay.append(f'pooling="{ours}"')
    # HuggingFaceEmbedding normalizes by default; HuggingFaceEmbeddings leaves it to the modules.
    normalized = replaced == "HuggingFaceEmbedding" or (spec.has_modules and spec.normalize)
    if normalize is None and normalized != spec.normalize:
        notice.differ(f"vectors are {_NORMALIZED[spec.normalize]}", _NORMALIZED[normalized])
        notice.keep.append(f"normalize={normalized}")
        notice.stay.append(f"normalize={spec.normalize}")
    if normalize is False and replaced == "HuggingFaceEmbedding" and spec.has_modules and spec.normalize:
        # HuggingFaceEmbedding's normalize=False leaves the checkpoint's modules as they are.
        notice.differ("vectors are not normalized", "normalized by modules.json, in spite of the option")
        notice.keep.append("normalize=True")
    return notice.line(spec.name)


class _Notice:
    """The parts of a notice: what differs, and the options that keep the old vectors or the new."""

    def __init__(self, replaced: ReplacedClass) -> None:
        self.replaced = replaced
        self.differences: list[str] = []
        self.keep: list[str] = []
        self.stay: list[str] = []

    def differ(self, new: str, old: str) -> None:
        """Say that something is ``new`` here and ``old`` in the replaced class."""
        self.differences.append(f"{new} ({self.replaced}: {old})")

    def line(self, model: str) -> str | None:
        """The notice, if there is anything to say."""
        if not self.differences:
            return None
        line = (
            f"{model}: {', '.join(self.differences)}; so vectors differ from those of an index built with "
            f'{self.replaced}. To keep its vectors: {", ".join(self.keep)}, dtype="float32"'
        )
        return f"{line}. To keep these, without this notice: {', '.join(self.stay)}" if self.stay else line


def _bare_pooling(spec: ModelSpec) -> tuple[PoolingMode, ...]:
    """How sentence-transformers pools a checkpoint whose files do not say it."""
    return ("lasttoken",) if spec.architecture.endswith("ForCausalLM") else ("mean",)


def _named(prompt: str) -> str:
    return f'the prompt "{_escaped(prompt)}"' if prompt else "no prompt"


def _escaped(prompt: str) -> str:
    """As in Python source between double quotes, in one line."""
    return prompt.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
