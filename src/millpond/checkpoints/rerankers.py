"""LLM rerankers: which checkpoints score pairs, by which template and tokens, detected from the checkpoint itself.

No field in the config of a ``*ForCausalLM`` says that it was trained to answer "yes" or "no" about a pair. Its
name, the name in its config, its model card or a chat template for queries and documents do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from millpond.checkpoints.checkpoint import Checkpoint
from millpond.checkpoints.layouts.kalm import is_kalm
from millpond.checkpoints.templates.chat_template import read_chat_template
from millpond.checkpoints.templates.score_template import Longest, ScoreTemplate, shipped_template
from millpond.errors import ModelLoadError, UnsupportedArchitectureError
from millpond.tasks import Activation

Method = Literal["from_2_way_softmax", "no_post_processing"]


@dataclass(frozen=True, kw_only=True)
class Reranker:
    """How an LLM scores a pair."""

    template: ScoreTemplate | None  # renders the pair; `None`: the query followed by the document
    needs_template: bool = False  # whether it cannot score without one, which its files do not have
    # Tokens whose logits are the answer, by text or id, `(false, true)` for two; empty if the checkpoint has a score
    # head
    tokens: tuple[str | int, ...] = ()
    # `from_2_way_softmax`: one score, the true token's logit minus the false token's. `no_post_processing`: the logit
    # of each token.
    method: Method = "no_post_processing"
    activation: Activation = "sigmoid"  # applied to the answer; a score head has its own default
    divisor: float = 1.0  # the answer is divided by it first (a temperature)
    head: str = ""  # the linear whose one logit is the answer, if it is no class's own; empty: `tokens` or a score head


@dataclass(frozen=True, kw_only=True)
class RerankerFamily:
    """Rerankers of one maker, which share a template."""

    pattern: str  # matches the last part of the hub id
    model_types: tuple[str, ...]  # `model_type` of their backbones
    classes: tuple[str, ...] = ()  # classes that no other checkpoint has
    template: str  # a file of `templates/`; empty: it is not known, and the user has to pass it
    special_tokens: bool  # whether the tokenizer adds its special tokens around the template
    refused: str = ""  # why it is not served, and what is
    tokens: tuple[str | int, ...] = ()  # as in :class:`Reranker`; empty for a family with score heads only
    method: Method = "no_post_processing"  # as in :class:`Reranker`
    activation: Activation = "sigmoid"  # as in :class:`Reranker`
    divisor: float = 1.0  # as in :class:`Reranker`
    question: str = ""  # what the template asks
    # Whether there is a head behind each of the last layers: `own`, of which that of the last layer run is read, or
    # `first`, of which the model's code reads the first behind whatever layer is the last
    layer_heads: Literal["", "own", "first"] = ""


KALM = RerankerFamily(
    pattern=r"kalm-reranker-v1(-[\w.-]+)?",
    model_types=("t5gemma2",),
    template="kalm-reranker",
    special_tokens=False,
    tokens=("no", "yes"),
    method="from_2_way_softmax",
)
QWEN3 = RerankerFamily(
    pattern=r"qwen3-reranker(-[\w.-]+)?",
    model_types=("qwen3",),
    template="qwen3-reranker",
    special_tokens=False,
    tokens=("no", "yes"),
    method="from_2_way_softmax",
)
FAMILIES = (
    QWEN3,
    KALM,
    RerankerFamily(
        pattern=r"mxbai-rerank-(base|large)-v2(-[\w.-]+)?",
        model_types=("qwen2",),
        template="mxbai-rerank-v2",
        special_tokens=False,
        tokens=("0", "1"),
        method="from_2_way_softmax",
    ),
    RerankerFamily(
        pattern=r"bge-reranker-v2-gemma(-[\w.-]+)?",
        model_types=("gemma",),
        template="bge-reranker-v2-gemma",
        special_tokens=True,
        tokens=("Yes",),
        activation="identity",
    ),
    RerankerFamily(
        pattern=r"zerank-\d(-[\w.-]+)?",
        model_types=("qwen3",),
        template="zerank",
        special_tokens=False,
        tokens=("Yes",),
        divisor=5.0,
    ),
    RerankerFamily(
        pattern=r"ctxl-rerank-v2(-[\w.-]+)?",
        model_types=("qwen3", "mistral"),
        template="ctxl-rerank-v2",
        special_tokens=True,
        tokens=(0,),
        activation="identity",
    ),
    RerankerFamily(
        pattern=r"bge-reranker-v2-minicpm-layerwise(-[\w.-]+)?",
        model_types=("minicpm",),
        classes=("LayerWiseMiniCPMForCausalLM",),
        template="bge-reranker-layers",
        question=(
            "Given a query A and a passage B, determine whether the passage contains an answer to the query by "
            "providing a prediction of either 'Yes' or 'No'."
        ),
        special_tokens=True,
        activation="identity",
        layer_heads="own",
    ),
    RerankerFamily(
        pattern=r"bge-reranker-v2\.5-gemma2-lightweight(-[\w.-]+)?",
        model_types=("cost_wise_gemma",),
        classes=("CostWiseGemmaForCausalLM",),
        template="bge-reranker-layers",
        question="Predict whether passage B contains an answer to query A.",
        special_tokens=True,
        activation="identity",
        layer_heads="first",
    ),
    RerankerFamily(
        pattern=r"lighton-rerank-pw(-[\w.-]+)?",
        model_types=("qwen3_5_text",),
        template="",
        special_tokens=False,
        tokens=("No", "Yes"),
        method="from_2_way_softmax",
        activation="identity",
    ),
    RerankerFamily(
        pattern=r"lighton-rerank-lw(-[\w.-]+)?",
        model_types=("qwen3_5_text",),
        template="",
        special_tokens=False,
        refused="ranks four documents at a time by writing their order, and millpond writes no text; for scores of "
        "pairs load lightonai/LightOn-rerank-PW-0.8B with its score_template=, or Qwen/Qwen3-Reranker-0.6B",
    ),
    RerankerFamily(
        pattern=r"llama-(3\.2-)?(nemotron|nemoretriever|nv)-[\w.-]*rerank[\w.-]*",
        model_types=("llama", "llama_bidirec"),
        classes=("LlamaBidirectionalForSequenceClassification",),
        template="nemotron-rerank",
        special_tokens=True,
    ),
)
# Ends of the names of classes that score pairs: of language models, which may read images too, and of score heads.
_SCORING = ("ForCausalLM", "ForConditionalGeneration", "ForSequenceClassification")
# Tokens by which sentence-transformers scores with a language model whose files name none.
DEFAULT_TOKENS = ("no", "yes")
_RANKING = frozenset(("text-ranking", "text-classification"))
_RERANKER_TAGS = frozenset(("reranker", "reranking", "rerank", "text-reranking", "cross-encoder"))
_EMBEDDING = frozenset(("feature-extraction", "sentence-similarity"))
_EMBEDDING_TAGS = _EMBEDDING | {"embedding", "embeddings", "text-embedding", "text-embeddings"}


def detect_reranker(checkpoint: Checkpoint) -> Reranker | None:
    """How a language model, or one with a score head, reranks; ``None`` if it is no LLM reranker.

    vLLM's keys ``classifier_from_token``, ``method`` and ``is_original_qwen3_reranker`` in its config have precedence.

    Raises:
        UnsupportedArchitectureError: It ranks in a way that is not run.
    """
    config, folder = checkpoint.config, checkpoint.source.folder
    architecture = checkpoint.architecture or ""
    override = _override(config)
    if override is None and not architecture.endswith(_SCORING):
        return None
    if override is None and (folder / "modules.json").is_file() and not is_kalm(folder):
        return None  # sentence-transformers' files describe it
    original = bool(config.get("is_original_qwen3_reranker"))
    family = QWEN3 if original else find_family(name=checkpoint.source.name, folder=folder, config=config)
    if family is not None and family.refused and override is None:
        raise UnsupportedArchitectureError(f"{checkpoint.source.name} {family.refused}")
    chat_template = read_chat_template(checkpoint.layout.transformer)
    template = chat_template if chat_template is not None and chat_template.names_roles else None
    if template is None and family is not None and family.template:
        template = shipped_template(family.template, special_tokens=family.special_tokens)
        template = template.bound({"question": family.question}) if family.question else template
        template = _bounded(template, config) if family is KALM else template
    if override is not None:
        return replace(override, template=template, activation=family.activation if family else override.activation)
    if template is None and (family is None or family.template):
        return None
    if architecture.endswith("ForSequenceClassification"):
        return Reranker(template=template)
    if family is None:
        return Reranker(template=template, tokens=DEFAULT_TOKENS, method="from_2_way_softmax")
    if family.layer_heads:
        first = int(config["start_layer"]) if family.layer_heads == "own" else int(config["num_hidden_layers"])
        number = int(config["num_hidden_layers"]) - first
        return Reranker(template=template, head=f"lm_head.{number}.linear_head", activation=family.activation)
    if not family.tokens:
        return None
    return Reranker(
        template=template,
        needs_template=template is None,
        tokens=family.tokens,
        method=family.method,
        activation=family.activation,
        divisor=family.divisor,
    )


def check_unknown(checkpoint: Checkpoint) -> None:
    """Refuse a language model that its card calls a reranker, and that :func:`detect_reranker` knows nothing about.

    Raises:
        UnsupportedArchitectureError: As an embedder it would give vectors that mean nothing.
    """
    source = checkpoint.source
    task, said = _read_card(source.folder / "README.md").ranking_task, "its README.md says"
    if task is None and any("rerank" in name for name in _own_names(source.name, source.folder, checkpoint.config)):
        task, said = "reranking", "its name says"
    if task is None:
        return
    raise UnsupportedArchitectureError(
        f"{source.name} is a language model for {task}, as {said}, and millpond knows neither "
        "the template nor the tokens that it scores pairs by; name them with score_template= (a Jinja file) and "
        'hf_overrides={"classifier_from_token": ["no", "yes"]}, or load it with convert="embed" if it embeds'
    )


def find_family(*, name: str, folder: Path, config: Mapping[str, Any]) -> RerankerFamily | None:
    """The family that the checkpoint's names, class or model card mention."""
    if is_kalm(folder):
        return KALM
    classes = set(config.get("architectures") or ())
    for family in FAMILIES:
        if classes & set(family.classes):
            return family
    card = _read_card(folder / "README.md")
    own = _own_names(name, folder, config)
    families = [family for family in FAMILIES if config.get("model_type") in family.model_types]
    for last_parts in (own, _last_parts(card.base_models)):
        for family in families:
            if any(re.fullmatch(family.pattern, last) for last in last_parts):
                return family
    return next((family for family in families if card.mentions(family.pattern)), None)


def _bounded(template: ScoreTemplate, config: Mapping[str, Any]) -> ScoreTemplate:
    """KaLM's template with its settings, which are its code's where no file has them."""
    longest = Longest(document=config.get("document_max_length", 1024), query=config.get("query_max_length", 512))
    return replace(template.bound({"system": config.get("system_instruction")}), longest=longest)


def _own_names(name: str, folder: Path, config: Mapping[str, Any]) -> set[str]:
    """The last parts of the names that a checkpoint itself has."""
    cached = [part.rsplit("--", 1)[-1] for part in folder.parts if part.startswith("models--")]  # the hub's cache
    return _last_parts([name, folder.name, str(config.get("_name_or_path") or ""), *cached])


def _last_parts(names: Iterable[str]) -> set[str]:
    return {name.rstrip("/").rsplit("/", 1)[-1].lower() for name in names}


def _override(config: Mapping[str, Any]) -> Reranker | None:
    """The user's tokens and method, from vLLM's keys; without a template."""
    original = config.get("is_original_qwen3_reranker")
    value = config.get("classifier_from_token", list(QWEN3.tokens) if original else None)
    if value is None:
        return None
    tokens = [value] if isinstance(value, str) else value
    if not isinstance(tokens, list | tuple) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ModelLoadError(
            f'classifier_from_token={value!r} must be a list of tokens, for example ["no", "yes"] (false, true)'
        )
    method = config.get("method") or ("from_2_way_softmax" if original or len(tokens) == 2 else "no_post_processing")
    if method not in get_args(Method):
        raise ModelLoadError(f"method={method!r} is unknown; choose {', '.join(get_args(Method))}")
    if method == "from_2_way_softmax" and len(tokens) != 2:
        raise ModelLoadError(
            f"classifier_from_token={value!r} with from_2_way_softmax must be two tokens, the false one first"
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
    """A model card."""

    base_models: tuple[str, ...] = ()  # hub ids from its front matter
    heading: str = ""  # the first heading
    ranking_task: str | None = None  # its pipeline_tag or the first of its tags that is one of ranking
    text: str = ""  # its text, if its pipeline_tag is one of ranking; other cards may mention rerankers, too

    def mentions(self, pattern: str) -> bool:
        word = rf"(?<![\w-])(?:{pattern})(?![\w-])"
        loaded = rf"[\"'][\w.-]+/(?:{pattern})[\"']"  # a comparison names others, too
        return any(
            re.search(*place) is not None for place in ((word, self.heading.lower()), (loaded, self.text.lower()))
        )


def _read_card(path: Path) -> _Card:
    if not path.is_file():
        return _Card()
    content = path.read_text(encoding="utf-8-sig", errors="replace").lstrip()
    front = re.match(r"---[ \t]*\n(.*?)\n---[ \t]*(?:\n|$)", content, flags=re.DOTALL)
    matter, body = (front.group(1), content[front.end() :]) if front else ("", content)
    tag = re.search(r"^pipeline_tag[ \t]*:[ \t]*(?:[>|]-?\s+)?[\"']?([\w-]+)", matter, flags=re.MULTILINE)
    task = None if tag is None else tag.group(1)
    tags = _listed("tags", matter)
    # A pipeline_tag of vectors counts more than a tag, and one of texts, which every language model may have, less.
    of_tags = next((tag for tag in tags if tag in _RANKING), "reranking" if _RERANKER_TAGS & set(tags) else None)
    of_tags = None if task in _EMBEDDING or _EMBEDDING_TAGS & set(tags) else of_tags
    heading = re.search(r"^#\s+(.+)$", body, flags=re.MULTILINE)
    return _Card(
        base_models=tuple(name for name in _listed("base_model", matter) if "/" in name),
        heading=heading.group(1) if heading else "",
        ranking_task=task if task in _RANKING else of_tags,
        text=body if task in _RANKING else "",
    )


def _listed(key: str, matter: str) -> list[str]:
    """The value of ``key`` in a card's front matter: one word, or a list of them in either of YAML's forms."""
    # Up to the next key: a line that is not blank, indented, a comment, or a part of a list.
    found = re.search(rf"^{key}[ \t]*:(.*(?:\n(?:[ \t#\]].*|-[ \t].*|(?=\n|$)))*)", matter, flags=re.MULTILINE)
    lines = [] if found is None else re.sub(r"(?:^|\s)#.*", "", found.group(1)).split("\n")
    return [word for line in lines for word in re.findall(r"[\w.-]+(?:/[\w.-]+)?", re.sub(r"^[ \t]*-[ \t]", "", line))]
