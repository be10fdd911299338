"""Classifier heads: what a ``*For...Classification`` or reward checkpoint computes from its hidden states.

A head is data: linears by the names of their tensors, with activations and norms between them. It is read and run here
in float32, never by transformers' class, which would look for the token to classify in the wrong row of a packed batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millpond.checkpoints.architecture import Architecture
from millpond.checkpoints.classifier_steps import HeadRows, Linear, PoolingField, Step, read_steps
from millpond.errors import ModelLoadError
from millpond.tasks import Activation
from millpond.values.spec import PoolingMode
from millpond.vectors.activations import TORCH

# Token whose rows a process reward model scores, as text and as id.
_PROCESS_TAG = ("<extra_0>", 151651)


@dataclass(frozen=True, kw_only=True)
class Classifier:
    """Hidden states to logits."""

    folder: Path  # where the tensors are
    pooling: PoolingMode | None  # the row that a text's logits come from; `None` for a head on every token only
    steps: tuple[Step, ...]  # applied in order
    labels: tuple[str, ...]  # class names by index
    activation: str  # applied to the logits by default; of :mod:`millpond.vectors.activations`
    pool_logits: bool = False  # pool the logits rather than the hidden states
    divisor: float = 1.0  # the logits are divided by it (a temperature)
    reward: bool = False  # a reward model: it returns raw rewards by default
    per_token: bool = False  # it returns a row for each token by default
    # The token whose rows are rewards, as text and as id; `None` for every token
    step_tag: tuple[str, int] | None = None


def sequence_classifier(config: Mapping[str, Any], row: Architecture, folder: Path) -> Classifier:
    """The head of a ``*ForSequenceClassification`` checkpoint."""
    head = row.classifiers
    pooling, pool_logits = _pooling(config, head.pooling, folder)
    pooled = not head.pooler_field or config.get(head.pooler_field, True)
    return Classifier(
        folder=folder,
        pooling=pooling,
        steps=read_steps(head.sequence if pooled else head.sequence[-1:], config),
        labels=labels(config),
        activation=activation(config, len(labels(config))),
        pool_logits=pool_logits,
        divisor=float(config.get(head.divisor) or 1.0),
    )


def token_classifier(config: Mapping[str, Any], row: Architecture, folder: Path) -> Classifier:
    """The head of a ``*ForTokenClassification`` checkpoint.

    Its default activation is softmax for any ``problem_type``, as in transformers' pipeline; for a single label,
    where softmax is always 1, sigmoid.
    """
    return Classifier(
        folder=folder,
        pooling=None,
        steps=read_steps(row.classifiers.tokens, config),
        labels=labels(config),
        activation="sigmoid" if len(labels(config)) == 1 else "softmax",
        per_token=True,
    )


def reward_model(config: Mapping[str, Any], row: Architecture, architecture: str, folder: Path) -> Classifier:
    """The head of a ``*ForRewardModel`` or ``*ForProcessRewardModel`` checkpoint, the class being ``architecture``."""
    process = architecture.endswith("ForProcessRewardModel")
    return Classifier(
        folder=folder,
        pooling="lasttoken",
        steps=read_steps(row.reward_head, config),
        labels=("bad", "good") if process else ("reward",),
        activation="softmax" if process else "sigmoid",
        reward=True,
        per_token=process,
        step_tag=_PROCESS_TAG if process else None,
    )


def token_scores(
    config: Mapping[str, Any],
    folder: Path,
    tokens: tuple[int, ...],
    *,
    difference: bool,
    activation: str,
    divisor: float = 1.0,
) -> Classifier:
    """A language model as a classifier: the logits of a few tokens at the end of the text."""
    count, named = 1 if difference else len(tokens), labels(config)
    return Classifier(
        folder=folder,
        pooling="lasttoken",
        steps=(HeadRows(tokens=tokens, difference=difference),),
        labels=named if len(named) == count else tuple(f"LABEL_{index}" for index in range(count)),
        activation=activation,
        divisor=divisor * float(config.get("logits_scaling") or 1.0),  # Granite's
    )


def single_logit(folder: Path, name: str, *, softcap: float | None, activation: str) -> Classifier:
    """One logit of the last token, by a linear without a bias."""
    return Classifier(
        folder=folder,
        pooling="lasttoken",
        steps=(Linear(name=name, biased=False, softcap=softcap),),
        labels=("LABEL_0",),
        activation=activation,
    )


def labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Class names by index; ``LABEL_i`` if the config gives only their number, empty if it gives neither."""
    id2label = config.get("id2label")
    if isinstance(id2label, Mapping) and id2label:
        try:
            by_index = {int(index): str(name) for index, name in id2label.items()}
        except ValueError as error:
            raise ModelLoadError(f"id2label {dict(id2label)!r} must map indices to names") from error
        if sorted(by_index) != list(range(len(by_index))):
            raise ModelLoadError(f"id2label has the indices {sorted(by_index)}; they must run from 0 without a gap")
        return tuple(by_index[index] for index in sorted(by_index))
    label2id = config.get("label2id")
    if isinstance(label2id, Mapping) and label2id:
        return labels({"id2label": {index: name for name, index in label2id.items()}})
    count = config.get("num_labels")
    return tuple(f"LABEL_{index}" for index in range(int(count))) if count is not None else ()


def entailment(config: Mapping[str, Any], labels: tuple[str, ...]) -> int | None:
    """Index of entailment among several ``labels``, looked for in label2id as transformers' pipeline does."""
    label2id = config.get("label2id") or {name: index for index, name in enumerate(labels)}
    found = (int(index) for name, index in label2id.items() if str(name).lower().startswith("entail"))
    index = next(found, len(labels))
    return index if index < len(labels) and len(labels) > 1 else None


def activation(config: Mapping[str, Any], width: int) -> str:
    """Activation of ``width`` logits: by problem_type, then by sentence-transformers' key, then by the width."""
    default: Activation = "sigmoid" if width == 1 else "softmax"
    problem = config.get("problem_type")
    if problem == "regression":
        return "identity"
    if problem == "multi_label_classification":
        return "sigmoid"
    if problem == "single_label_classification":
        return default
    dotted = (config.get("sentence_transformers") or {}).get("activation_fn")
    dotted = dotted or config.get("sbert_ce_default_activation_function")
    return default if dotted is None else torch_activation(str(dotted), width)


def torch_activation(dotted: str, width: int) -> str:
    """An activation of ``width`` logits by its class in torch.nn, as sentence-transformers writes it."""
    name = dotted.rsplit(".", 1)[-1]
    if not dotted.startswith("torch.nn.") or name not in TORCH:
        raise ModelLoadError(
            f"the checkpoint's activation {dotted!r} is no class of torch.nn without arguments (such as Identity, "
            'Sigmoid, Softmax and Tanh); override it with activation="identity" or "sigmoid"'
        )
    known = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax"}
    return "sigmoid" if (name, width) == ("Softmax", 1) else known.get(name, name)  # a softmax of one logit is always 1


def _pooling(config: Mapping[str, Any], pooling: PoolingMode | PoolingField, folder: Path) -> tuple[PoolingMode, bool]:
    """(pooling, whether it pools the logits) of a family's sequence classifier."""
    if not isinstance(pooling, PoolingField):
        return pooling, False
    value = pooling.read(config)
    if value not in pooling.modes:
        raise ModelLoadError(
            f"{folder}: {pooling.names[0]} {value!r} of config.json is unknown; {', '.join(pooling.modes)} are"
        )
    return pooling.modes[value], value in pooling.of_logits
