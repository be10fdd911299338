"""LLM rerankers: which checkpoints score pairs, by what template and at which tokens, told from the checkpoint itself.

Nothing in the config of a ``*ForCausalLM`` says that it was trained to answer "yes" or "no" about a pair. What does:
its name, the name in its config, its model card, or a chat template made for queries and documents.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from millpond.checkpoints.chat_template import read_chat_template
from millpond.checkpoints.checkpoint import Checkpoint
from millpond.checkpoints.score_template import ScoreTemplate, shipped_template
from millpond.errors import ModelLoadError
from millpond.tasks import Activation

Method = Literal["from_2_way_softmax", "no_post_processing"]


@dataclass(frozen=True, kw_only=True)
class Reranker:
    """How an LLM scores a pair.

    Attributes:
        template: What it reads; ``None``: query and document, one behind the other.
        tokens: Tokens of the vocabulary whose logits are the answer, by their text, ``(false, true)`` for two;
            empty where the checkpoint has a score head of its own.
        method: ``from_2_way_softmax``: one score, the true token's logit less the false one's.
            ``no_post_processing``: each token's logit.
        activation: What is made of the answer; a score head has a habit of its own.
    """

    template: ScoreTemplate | None
    tokens: tuple[str, ...] = ()
    method: Method = "no_post_processing"
    activation: Activation = "sigmoid"

    @property
    def true_token(self) -> str | None:
        """The token of a relevant document; ``None`` for a score head."""
        return self.tokens[-1] if self.tokens else None

    @property
    def false_token(self) -> str | None:
        """The token whose logit is taken off the true one's; ``None`` where none is."""
        return self.tokens[0] if self.method == "from_2_way_softmax" else None


@dataclass(frozen=True, kw_only=True)
class Family:
    """Checkpoints called ``pattern`` (the last part of a hub id), on a backbone of ``model_types``.

    Attributes:
        template: A file of ``templates/``.
        special_tokens: Whether the tokenizer's own go around it.
        tokens: Of the language model; empty for a family that only has score heads.
    """

    pattern: str
    model_types: tuple[str, ...]
    template: str
    special_tokens: bool
    tokens: tuple[str, ...] = ()
    method: Method = "no_post_processing"
    activation: Activation = "sigmoid"


QWEN3 = Family(
    pattern=r"qwen3-reranker(-[\w.-]+)?",
    model_types=("qwen3",),
    template="qwen3-reranker",
    special_tokens=False,
    tokens=("no", "yes"),
    method="from_2_way_softmax",
)
FAMILIES = (
    QWEN3,
    Family(
        pattern=r"mxbai-rerank-(base|large)-v2(-[\w.-]+)?",
        model_types=("qwen2",),
        template="mxbai-rerank-v2",
        special_tokens=False,
        tokens=("0", "1"),
        method="from_2_way_softmax",
    ),
    Family(
        pattern=r"bge-reranker-v2-gemma(-[\w.-]+)?",
        model_types=("gemma",),
        template="bge-reranker-v2-gemma",
        special_tokens=True,
        tokens=("Yes",),
        activation="identity",
    ),
    Family(
        pattern=r"llama-(3\.2-)?(nemotron|nemoretriever|nv)-[\w.-]*rerank[\w.-]*",
        model_types=("llama", "llama_bidirec"),
        template="nemotron-rerank",
        special_tokens=True,
    ),
)
# The nemotron rerankers' class, which no other model has.
_NEMOTRON_CLASS = "LlamaBidirectionalForSequenceClassification"
# What sentence-transformers asks a language model about whose files name no tokens.
_ASKED = ("no", "yes")
_RANKING = frozenset(("text-ranking", "text-classification"))


def detect_reranker(checkpoint: Checkpoint) -> Reranker | None:
    """How a ``*ForCausalLM`` or ``*ForSequenceClassification`` checkpoint reranks; ``None`` if it is no LLM reranker.

    vLLM's keys ``classifier_from_token``, ``method`` and ``is_original_qwen3_reranker`` in its config win.

    Raises:
        ModelLoadError: An override that means nothing.
    """
    config, folder = checkpoint.config, checkpoint.source.folder
    architecture = checkpoint.architecture or ""
    asked = _asked(config)
    if asked is None and not architecture.endswith(("ForCausalLM", "ForSequenceClassification")):
        return None
    if asked is None and (folder / "modules.json").is_file():
        return None  # sentence-transformers' files say what it is
    original = bool(config.get("is_original_qwen3_reranker"))
    family = QWEN3 if original else find_family(name=checkpoint.source.name, folder=folder, config=config)
    own = read_chat_template(checkpoint.layout.transformer)
    template = own if own is not None and own.names_roles else None
    if template is None and family is not None:
        template = shipped_template(family.template, special_tokens=family.special_tokens)
    if asked is not None:
        return replace(asked, template=template, activation=family.activation if family else asked.activation)
    if template is None:
        return None
    if architecture.endswith("ForSequenceClassification"):
        return Reranker(template=template)
    if family is None:
        return Reranker(template=template, tokens=_ASKED, method="from_2_way_softmax")
    if not family.tokens:
        return None
    return Reranker(template=template, tokens=family.tokens, method=family.method, activation=family.activation)


def find_family(*, name: str, folder: Path, config: Mapping[str, Any]) -> Family | None:
    """The family that the checkpoint's names, class or model card speak of."""
    if _NEMOTRON_CLASS in (config.get("architectures") or ()):
        return FAMILIES[-1]
    card = _read_card(folder / "README.md")
    names = [name, folder.name, str(config.get("_name_or_path") or ""), *card.base_models]
    names += [part.rsplit("--", 1)[-1] for part in folder.parts if part.startswith("models--")]  # the hub's cache
    called = {named.rstrip("/").rsplit("/", 1)[-1].lower() for named in names}
    for family in FAMILIES:
        if config.get("model_type") not in family.model_types:
            continue
        if any(re.fullmatch(family.pattern, last) for last in called) or card.mentions(family.pattern):
            return family
    return None


def _asked(config: Mapping[str, Any]) -> Reranker | None:
    """The user's tokens and method, in vLLM's keys; no template yet."""
    original = config.get("is_original_qwen3_reranker")
    written = config.get("classifier_from_token", list(QWEN3.tokens) if original else None)
    if written is None:
        return None
    tokens = [written] if isinstance(written, str) else written
    if not isinstance(tokens, list | tuple) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ModelLoadError(
            f'classifier_from_token={written!r} must be a list of tokens, for example ["no", "yes"] (false, true)'
        )
    method = config.get("method") or ("from_2_way_softmax" if original or len(tokens) == 2 else "no_post_processing")
    if method not in get_args(Method):
        raise ModelLoadError(f"method={method!r} is unknown; choose {', '.join(get_args(Method))}")
    if method == "from_2_way_softmax" and len(tokens) != 2:
        raise ModelLoadError(
            f"classifier_from_token={written!r} with from_2_way_softmax must be two tokens, the false one first"
        )
    several = method == "no_post_processing" and len(tokens) > 1
    return Reranker(
        template=None,
        tokens=tuple(tokens),
        method=cast("Method", method),
        activation="softmax" if several else "sigmoid",
    )


@dataclass(frozen=True, kw_only=True)
class _Card:
    """What a model card says.

    Attributes:
        base_models: Hub ids, from its front matter.
        heading: The first heading.
        text: All of it, of a card whose task is ranking; a card may well mention rerankers that it is not.
    """

    base_models: tuple[str, ...] = ()
    heading: str = ""
    text: str = ""

    def mentions(self, pattern: str) -> bool:
        found = rf"(?<![\w-])(?:{pattern})(?![\w-])"
        return any(re.search(found, text.lower()) is not None for text in (self.heading, self.text))


def _read_card(path: Path) -> _Card:
    if not path.is_file():
        return _Card()
    content = path.read_text(encoding="utf-8", errors="replace")
    front = re.match(r"---\n(.*?)\n---\n", content, flags=re.DOTALL)
    matter, body = (front.group(1), content[front.end() :]) if front else ("", content)
    task = re.search(r"^pipeline_tag:\s*(\S+)", matter, flags=re.MULTILINE)
    heading = re.search(r"^#\s+(.+)$", body, flags=re.MULTILINE)
    return _Card(
        base_models=_base_models(matter),
        heading=heading.group(1) if heading else "",
        text=body if task is not None and task.group(1) in _RANKING else "",
    )


def _base_models(matter: str) -> tuple[str, ...]:
    """``base_model`` of a front matter: one id, or a list of them."""
    found = re.search(r"^base_model:[ \t]*(.*(?:\n[ \t]*-[ \t]+.*)*)", matter, flags=re.MULTILINE)
    return tuple(re.findall(r"[\w.-]+/[\w.-]+", found.group(1))) if found else ()
