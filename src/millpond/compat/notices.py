"""What an adapter logs once per process: where its vectors differ from those of the class that it replaces."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from millpond.compat.prompts import AUTO, PromptOptions, ReplacedClass, replaced_prompt, siblings
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
    found = _Differences(spec, replaced)
    found.of_prompts(prompts)
    found.of_pooling(pooling)
    found.of_lengths(normalize)
    found.log()
    for sibling in siblings(spec.name, replaced):  # pooling and lengths are those of the class above
        found = _Differences(spec, sibling)
        found.of_prompts(prompts)
        found.log()


class _Differences:
    """Where the vectors of an adapter differ from those of one class."""

    def __init__(self, spec: ModelSpec, replaced: ReplacedClass) -> None:
        self._spec = spec
        self._replaced = replaced
        self._differ: list[str] = []
        self._keep: list[str] = []  # the options that keep the old vectors
        self._stay: list[str] = []  # those that keep the new ones, without this notice

    def of_prompts(self, prompts: Mapping[Role, PromptOptions]) -> None:
        for role in ROLES:
            if prompts[role] != PromptOptions():
                continue
            old, new = replaced_prompt(self._spec, role, self._replaced), self._spec.role_prompt(role) or ""
            self._keep.append(f'{role}_prompt="{_escaped(old)}"')
            if old != new:
                self._differ.append(f"{_PLURALS[role]} get {_named(new)} ({self._replaced}: {_named(old)})")
                self._stay.append(f'{role}_prompt="{AUTO if new else ""}"')

    def of_pooling(self, pooling: str | None) -> None:
        """How sentence-transformers pools a checkpoint whose files do not say it."""
        spec = self._spec
        bare = ("lasttoken",) if spec.architecture.endswith("ForCausalLM") else ("mean",)
        if pooling is None and not spec.has_modules and bare != spec.pooling:
            ours, theirs = "+".join(spec.pooling), "+".join(bare)
            self._differ.append(f'the pooling is "{ours}", as there is no modules.json ({self._replaced}: "{theirs}")')
            self._keep.append(f'pooling="{theirs}"')
            self._stay.append(f'pooling="{ours}"')

    def of_lengths(self, normalize: bool | None) -> None:
        """Whether vectors have the length 1.

        HuggingFaceEmbedding normalizes by default, and with normalize=False leaves the checkpoint's modules as they
        are; LangChain's classes leave it to the modules.
        """
        spec, replaced = self._spec, self._replaced
        by_modules = spec.has_modules and spec.normalize
        normalized = by_modules or (replaced == "HuggingFaceEmbedding" and normalize is None)
        if normalize is None and normalized != spec.normalize:
            self._differ.append(f"vectors are {_NORMALIZED[spec.normalize]} ({replaced}: {_NORMALIZED[normalized]})")
            self._keep.append(f"normalize={normalized}")
            self._stay.append(f"normalize={spec.normalize}")
        if normalize is False and replaced == "HuggingFaceEmbedding" and by_modules:
            self._differ.append(
                f"vectors are not normalized ({replaced}: normalized by modules.json, in spite of the option)"
            )
            self._keep.append("normalize=True")

    def log(self) -> None:
        if not self._differ:
            return
        adapter = "MillpondBgeEmbeddings, or " if self._replaced == "HuggingFaceBgeEmbeddings" else ""
        log_once(
            f"{self._spec.name}: {', '.join(self._differ)}; so vectors differ from those of an index built with "
            f'{self._replaced}. To keep its vectors: {adapter}{", ".join(self._keep)}, dtype="float32"'
            + (f". To keep these, without this notice: {', '.join(self._stay)}" if self._stay else "")
        )


def _named(prompt: str) -> str:
    return f'the prompt "{_escaped(prompt)}"' if prompt else "no prompt"


def _escaped(prompt: str) -> str:
    """As in Python source between double quotes, in one line."""
    return prompt.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
