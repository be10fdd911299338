"""Classifier heads: what a ``*For...Classification`` or reward checkpoint computes from its hidden states.

A head is data: linears by the names of their tensors, with activations and norms between them. It is read and run here
in float32, never through transformers' class, which would look for its one token in a packed row's wrong place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millpond.errors import ModelLoadError
from millpond.spec import PoolingMode
from millpond.tasks import Activation


@dataclass(frozen=True, kw_only=True)
class Linear:
    """``x W^T + b``; with ``biased`` the files must have a bias, else they may."""

    name: str
    biased: bool = True


@dataclass(frozen=True, kw_only=True)
class Norm:
    """Layer normalization; the bias is optional in the files."""

    name: str
    eps: float


@dataclass(frozen=True, kw_only=True)
class HeadRows:
    """Rows of the language-model head: one logit for each of ``tokens``, or ``tokens[1] - tokens[0]``."""

    tokens: tuple[int, ...]
    difference: bool = False


Step = Linear | Norm | HeadRows | str  # a str is an activation of transformers' names


@dataclass(frozen=True, kw_only=True)
class Classifier:
    """Hidden states to logits.

    Attributes:
        folder: Where the tensors are.
        pooling: Which row a text's logits come from; ``None`` for a head on every token only.
        pool_logits: Pool the logits rather than the rows.
        steps: Applied in order.
        labels: Class names by index.
        activation: What the checkpoint makes of its logits.
        divisor: The logits are divided by it (a temperature).
        reward: A reward model: raw rewards are its habit.
        per_token: Whether its habit is a row for each token.
        step_tag: The token whose rows are rewards, as text and as id; ``None`` for all.
    """

    folder: Path
    pooling: PoolingMode | None
    steps: tuple[Step, ...]
    labels: tuple[str, ...]
    activation: Activation
    pool_logits: bool = False
    divisor: float = 1.0
    reward: bool = False
    per_token: bool = False
    step_tag: tuple[str, int] | None = None


_POOLER = (Linear(name="pooler.dense"), "tanh", Linear(name="classifier"))
_ROBERTA = (Linear(name="classifier.dense"), "tanh", Linear(name="classifier.out_proj"))
_SCORE = (Linear(name="score", biased=False),)
_SEQUENCE: dict[str, tuple[Step, ...]] = {
    "bert": _POOLER,
    "gte": _POOLER,
    "nomic_bert": _POOLER,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "jina_embeddings_v3": _ROBERTA,
    "mpnet": _ROBERTA,
    "electra": (_ROBERTA[0], "gelu", _ROBERTA[2]),
    "distilbert": (Linear(name="pre_classifier"), "relu", Linear(name="classifier")),
    "albert": (Linear(name="pooler"), "tanh", Linear(name="classifier")),
    "deberta-v2": (Linear(name="pooler.dense"), "gelu", Linear(name="classifier")),
    "eurobert": (Linear(name="dense"), "gelu", Linear(name="classifier")),
}
_CLASSIFIER = (Linear(name="classifier"),)
# Qwen2ForRewardModel and its process twin; tensors score.0 and score.2.
_QWEN_REWARD = (Linear(name="score.0"), "relu", Linear(name="score.2"))
_PROCESS_TAG = ("<extra_0>", 151651)
_MODERNBERT_POOLING: dict[str, PoolingMode] = {"cls": "cls", "mean": "mean"}
_EUROBERT_POOLING: dict[str, PoolingMode] = {"bos": "cls", "mean": "mean", "late": "mean"}
LLAMA_POOLING: dict[str, PoolingMode] = {"avg": "mean", "mean": "mean", "cls": "cls", "last": "lasttoken"}


def sequence_classifier(config: Mapping[str, Any], row: str, folder: Path, *, decoder: bool) -> Classifier:
    """The head of a ``*ForSequenceClassification`` checkpoint of the family ``row`` (a ``model_type``)."""
    steps = _SEQUENCE.get(row, _SCORE if decoder else _CLASSIFIER)
    pooling: PoolingMode = "lasttoken" if decoder else "cls"
    pool_logits, divisor = False, 1.0
    if row == "modernbert":
        steps = (*_modernbert_head(config), Linear(name="classifier"))
        pooling = _classifier_pooling(config, _MODERNBERT_POOLING, "cls", folder)
    elif row == "eurobert":
        pooling = _classifier_pooling(config, _EUROBERT_POOLING, "late", folder)
        pool_logits = _pooling_named(config, "late") == "late"
    elif row == "deberta-v2":
        steps = (steps[0], str(config.get("pooler_hidden_act", "gelu")), steps[2])
    elif row == "llama_bidirec":
        pooling, divisor = _llama_pooling(config, folder), float(config.get("temperature") or 1.0)
    return Classifier(
        folder=folder,
        pooling=pooling,
        steps=steps,
        labels=labels(config),
        activation=activation(config, len(labels(config))),
        pool_logits=pool_logits,
        divisor=divisor,
    )


def token_classifier(config: Mapping[str, Any], row: str, folder: Path, *, decoder: bool) -> Classifier:
    """The head of a ``*ForTokenClassification`` checkpoint.

    Softmax as transformers' pipeline has it, whatever the ``problem_type``; of one label, where that says nothing,
    sigmoid.
    """
    steps: tuple[Step, ...] = _SCORE if decoder and row != "gpt2" else _CLASSIFIER
    if row == "modernbert":
        steps = (*_modernbert_head(config), *_CLASSIFIER)
    return Classifier(
        folder=folder,
        pooling=None,
        steps=steps,
        labels=labels(config),
        activation="sigmoid" if len(labels(config)) == 1 else "softmax",
        per_token=True,
    )


def reward_model(config: Mapping[str, Any], architecture: str, folder: Path) -> Classifier:
    """The head of a ``*ForRewardModel`` or ``*ForProcessRewardModel`` checkpoint; raw rewards are its habit."""
    process = architecture.endswith("ForProcessRewardModel")
    steps = (Linear(name="v_head", biased=False),) if architecture.startswith("InternLM2") else _QWEN_REWARD
    return Classifier(
        folder=folder,
        pooling="lasttoken",
        steps=steps,
        labels=("bad", "good") if process else ("reward",),
        activation="softmax" if process else "sigmoid",
        reward=True,
        per_token=process,
        step_tag=_PROCESS_TAG if process else None,
    )


def token_scores(
    config: Mapping[str, Any], folder: Path, tokens: tuple[int, ...], *, difference: bool, activation: Activation
) -> Classifier:
    """A language model as a classifier: the logits of a few tokens at the end of the text, no vocabulary."""
    count = 1 if difference else len(tokens)
    return Classifier(
        folder=folder,
        pooling="lasttoken",
        steps=(HeadRows(tokens=tokens, difference=difference),),
        labels=_labels(config, count),
        activation=activation,
    )


def labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Class names by index; made up where the config gives a number only, and empty where it gives neither."""
    named = config.get("id2label")
    if isinstance(named, Mapping) and named:
        try:
            by_index = {int(index): str(name) for index, name in named.items()}
        except ValueError as error:
            raise ModelLoadError(f"id2label {dict(named)!r} must map indices to names") from error
        if sorted(by_index) != list(range(len(by_index))):
            raise ModelLoadError(f"id2label has the indices {sorted(by_index)}; they must run from 0 without a gap")
        return tuple(by_index[index] for index in sorted(by_index))
    backwards = config.get("label2id")
    if isinstance(backwards, Mapping) and backwards:
        return labels({"id2label": {index: name for name, index in backwards.items()}})
    count = config.get("num_labels")
    return tuple(f"LABEL_{index}" for index in range(int(count))) if count is not None else ()


def _labels(config: Mapping[str, Any], count: int) -> tuple[str, ...]:
    named = labels(config)
    return named if len(named) == count else tuple(f"LABEL_{index}" for index in range(count))


def activation(config: Mapping[str, Any], width: int) -> Activation:
    """What a checkpoint makes of ``width`` logits: problem_type, then sentence-transformers' key, then by width."""
    default: Activation = "sigmoid" if width == 1 else "softmax"
    problem = config.get("problem_type")
    if problem == "regression":
        return "identity"
    if problem == "multi_label_classification":
        return "sigmoid"
    if problem == "single_label_classification":
        return default
    written = (config.get("sentence_transformers") or {}).get("activation_fn")
    written = written or config.get("sbert_ce_default_activation_function")
    return default if written is None else torch_activation(str(written), width)


def torch_activation(dotted: str, width: int) -> Activation:
    """An activation by its class in torch.nn, as sentence-transformers writes it.

    Raises:
        ModelLoadError: Another class.
    """
    name = dotted.rsplit(".", 1)[-1]
    if not dotted.startswith("torch.nn.") or name not in ("Identity", "Sigmoid", "Softmax"):
        raise ModelLoadError(
            f"the checkpoint's activation {dotted!r} is none of torch.nn's Identity, Sigmoid and Softmax; "
            'override it with activation="identity" or "sigmoid"'
        )
    known: dict[str, Activation] = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax"}
    return "sigmoid" if (name, width) == ("Softmax", 1) else known[name]  # a softmax of one logit says nothing


def _modernbert_head(config: Mapping[str, Any]) -> tuple[Step, ...]:
    return (
        Linear(name="head.dense", biased=False),
        str(config.get("classifier_activation", "gelu")),
        Norm(name="head.norm", eps=float(config.get("norm_eps", 1e-5))),
    )


def _pooling_named(config: Mapping[str, Any], default: str) -> Any:
    """transformers' key; EuroBERT's own code, and what it saved, has the other one."""
    return config.get("classifier_pooling") or config.get("clf_pooling") or default


def _classifier_pooling(
    config: Mapping[str, Any], known: Mapping[str, PoolingMode], default: str, folder: Path
) -> PoolingMode:
    named = _pooling_named(config, default)
    if named not in known:
        raise ModelLoadError(
            f"{folder}: classifier_pooling {named!r} of config.json is unknown; {', '.join(known)} are"
        )
    return known[named]


def _llama_pooling(config: Mapping[str, Any], folder: Path) -> PoolingMode:
    named = config.get("pooling", "avg")
    if named not in LLAMA_POOLING:
        raise ModelLoadError(f"{folder}: pooling {named!r} of config.json is unknown; {', '.join(LLAMA_POOLING)} are")
    return LLAMA_POOLING[named]
