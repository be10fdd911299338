"""Steps of a classifier head as data, and which of them a family's classifiers have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from millpond.values.spec import PoolingMode


@dataclass(frozen=True, kw_only=True)
class Linear:
    """``x W^T + b``; with ``biased`` the files must have a bias, else they may."""

    name: str
    biased: bool = True
    softcap: float | None = None  # `softcap tanh(x W^T / softcap)` instead, without a bias


@dataclass(frozen=True, kw_only=True)
class Norm:
    """Layer normalization; the bias is optional in the files."""

    name: str  # prefix of its tensors
    eps: float  # added to the variance
    eps_field: str = ""  # field of config.json that replaces `eps`; empty: none does


@dataclass(frozen=True, kw_only=True)
class HeadRows:
    """Rows of the language-model head: one logit for each of ``tokens``, or ``tokens[1] - tokens[0]``."""

    tokens: tuple[int, ...]
    difference: bool = False


@dataclass(frozen=True, kw_only=True)
class ConfigField:
    """A value that a checkpoint's config.json may replace."""

    name: str
    default: Any

    def read(self, config: Mapping[str, Any]) -> Any:
        """The value for a checkpoint."""
        return config.get(self.name, self.default)


Step = Linear | Norm | HeadRows | str  # a str is an activation, by transformers' name
FamilyStep = Step | ConfigField  # a ConfigField is an activation that config.json names


def read_steps(steps: tuple[FamilyStep, ...], config: Mapping[str, Any]) -> tuple[Step, ...]:
    """A family's steps with the values of one checkpoint's config.json."""
    return tuple(_read_step(step, config) for step in steps)


def _read_step(step: FamilyStep, config: Mapping[str, Any]) -> Step:
    if isinstance(step, ConfigField):
        return str(step.read(config))
    if isinstance(step, Norm) and step.eps_field:
        return replace(step, eps=float(config.get(step.eps_field, step.eps)))
    return step


@dataclass(frozen=True, kw_only=True)
class PoolingField:
    """Fields of config.json that name a pooling."""

    names: tuple[str, ...]  # the fields; the first one with a value counts
    default: str  # the value where none has one
    modes: Mapping[str, PoolingMode] = field(hash=False)  # the pooling of each known value
    of_logits: frozenset[str] = frozenset()  # values that pool the logits rather than the hidden states
    empty_is_absent: bool = True  # an empty value stands for the default; otherwise it is a value, and an unknown one

    def read(self, config: Mapping[str, Any]) -> Any:
        """The value for a checkpoint, known or not."""
        present = [config[name] for name in self.names if name in config]
        return next((value for value in present if value or not self.empty_is_absent), self.default)


CLASSIFIER = (Linear(name="classifier"),)
SCORE = (Linear(name="score", biased=False),)


@dataclass(frozen=True, kw_only=True)
class FamilyHead:
    """The steps that a family's classifiers compute from hidden states."""

    sequence: tuple[FamilyStep, ...] = CLASSIFIER  # steps of `*ForSequenceClassification`
    tokens: tuple[FamilyStep, ...] = CLASSIFIER  # steps of `*ForTokenClassification`
    # The row that a text's logits come from, or the fields of config.json that name it
    pooling: PoolingMode | PoolingField = "cls"
    pooler_field: str = ""  # field of config.json which, if false, leaves only the last step of `sequence`; empty: none
    divisor: str = ""  # field of config.json that the logits are divided by (a temperature); empty: none


ENCODER_HEAD = FamilyHead()
DECODER_HEAD = FamilyHead(sequence=SCORE, tokens=SCORE, pooling="lasttoken")


# Heads of several families, or of one that has steps of its own.
POOLER_HEAD = FamilyHead(sequence=(Linear(name="pooler.dense"), "tanh", *CLASSIFIER))
ROBERTA_HEAD = FamilyHead(sequence=(Linear(name="classifier.dense"), "tanh", Linear(name="classifier.out_proj")))
BART_HEAD = FamilyHead(
    sequence=(Linear(name="classification_head.dense"), "tanh", Linear(name="classification_head.out_proj")),
    pooling="lasttoken",
)
_MODERNBERT_STEPS = (
    Linear(name="head.dense", biased=False),
    ConfigField(name="classifier_activation", default="gelu"),
    Norm(name="head.norm", eps=1e-5, eps_field="norm_eps"),
    *CLASSIFIER,
)
# transformers' name, then the one in EuroBERT's own code and in the files that it saved.
_CLASSIFIER_POOLING = ("classifier_pooling", "clf_pooling")
LLAMA_POOLING = PoolingField(
    names=("pooling",),
    default="avg",
    modes={"avg": "mean", "mean": "mean", "cls": "cls", "last": "lasttoken"},
    empty_is_absent=False,
)
MODERNBERT_HEAD = FamilyHead(
    sequence=_MODERNBERT_STEPS,
    tokens=_MODERNBERT_STEPS,
    pooling=PoolingField(names=_CLASSIFIER_POOLING, default="cls", modes={"cls": "cls", "mean": "mean"}),
)
ULTRABERT_HEAD = FamilyHead(pooling=MODERNBERT_HEAD.pooling)
EUROBERT_HEAD = FamilyHead(
    sequence=(Linear(name="dense"), "gelu", *CLASSIFIER),
    pooling=PoolingField(
        names=_CLASSIFIER_POOLING,
        default="late",
        modes={"bos": "cls", "mean": "mean", "late": "mean"},
        of_logits=frozenset(("late",)),
    ),
)
HIDDEN_ACT_HEAD = FamilyHead(
    sequence=(
        Linear(name="classifier.dense"),
        ConfigField(name="hidden_act", default="gelu"),
        Linear(name="classifier.out_proj"),
    )
)
DEBERTA_HEAD = FamilyHead(
    sequence=(Linear(name="pooler.dense"), ConfigField(name="pooler_hidden_act", default="gelu"), *CLASSIFIER)
)
ELECTRA_HEAD = FamilyHead(sequence=(Linear(name="classifier.dense"), "gelu", Linear(name="classifier.out_proj")))
