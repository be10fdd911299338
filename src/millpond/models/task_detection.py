"""Purpose: what a checkpoint is for, by its architecture's name, its files and the user's ``convert``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from millpond.checkpoints import classifiers
from millpond.checkpoints.checkpoint import Checkpoint
from millpond.checkpoints.classifiers import Classifier, Linear
from millpond.checkpoints.cross_encoder import CrossEncoder
from millpond.checkpoints.modules import Dense
from millpond.checkpoints.rerankers import Reranker, detect_reranker
from millpond.checkpoints.score_template import ScoreTemplate
from millpond.checkpoints.sparse import Splade
from millpond.checkpoints.weights import find_tensor, tensor_shapes
from millpond.errors import ModelLoadError
from millpond.models.architectures import Architecture
from millpond.spec import PoolingMode
from millpond.tasks import Activation, ScoreType, Task

_EMBED: frozenset[Task] = frozenset(("embed", "token_embed"))
# gte-multilingual-base's class: with one label it is a dense model, beside which a sparse head weighs tokens.
_WEIGHED = "NewForTokenClassification"


@dataclass(frozen=True, kw_only=True)
class Purpose:
    """What a checkpoint is for.

    Attributes:
        tasks: What it serves.
        score_type: How it scores a pair.
        labels: Class names by index.
        activation: What it makes of its logits.
        classifier: Its head, where it has one.
        pooled_logits: The pooled vector, behind its heads, is the logits.
        template: How it reads pairs, where that takes more than the tokenizer's own pairs.
        prompt: Put before every query of a pair.
    """

    tasks: frozenset[Task]
    score_type: ScoreType | None
    labels: tuple[str, ...] = ()
    activation: Activation = "identity"
    classifier: Classifier | None = None
    pooled_logits: bool = False
    template: ScoreTemplate | None = None
    prompt: str = ""


def decide(
    checkpoint: Checkpoint, row: Architecture, *, convert: str, token_id: Callable[[str], int | None]
) -> Purpose:
    """What ``checkpoint`` is for.

    Args:
        checkpoint: Its descriptions.
        row: Its architecture.
        convert: ``auto``, ``embed`` or ``classify``.
        token_id: A token's id in the checkpoint's vocabulary.

    Raises:
        ModelLoadError: The head's description makes no sense.
    """
    layout, claimed = checkpoint.layout, checkpoint.architecture or row.model_class
    if convert == "embed":
        return Purpose(tasks=_EMBED, score_type="bi-encoder")
    if isinstance(layout.sparse, Splade) and convert == "auto":
        return Purpose(tasks=frozenset(("sparse_embed",)), score_type=None)
    if layout.sparse is not None and convert == "auto":
        return Purpose(tasks=_EMBED | {"sparse_embed"}, score_type="bi-encoder")
    if getattr(layout, "late_interaction", None) is not None and convert == "auto":
        return Purpose(tasks=frozenset(("token_embed", "score")), score_type="late-interaction")
    if claimed.endswith(("RewardModel", "ForRewardModeling")):
        head = classifiers.reward_model(checkpoint.config, claimed, layout.transformer)
        if not claimed.endswith(("ForRewardModel", "ForProcessRewardModel")):
            head = _as_found(head)
            if not _is_there(head):
                return Purpose(tasks=_EMBED, score_type="bi-encoder")
        return _with_head(head, _EMBED | {"reward", "token_classify"})
    if claimed.endswith("ForTokenClassification"):
        head = _labelled(classifiers.token_classifier, checkpoint.config, row, layout.transformer)
        if claimed != _WEIGHED or len(head.labels) > 1 or convert == "classify":
            return _with_head(head, {"token_classify"})
    if checkpoint.cross_encoder is not None:
        return _cross_encoder(checkpoint, checkpoint.cross_encoder, row, token_id)
    reranker = detect_reranker(checkpoint)
    is_classifier = claimed.endswith(("ForSequenceClassification", "ClassificationModel")) or convert == "classify"
    if is_classifier or (reranker is not None and layout.pooling is None):
        return _classification(checkpoint, row, reranker, token_id)
    return Purpose(tasks=_EMBED, score_type="bi-encoder")


def _with_head(head: Classifier, tasks: set[Task] | frozenset[Task]) -> Purpose:
    return Purpose(
        tasks=frozenset(tasks), score_type=None, labels=head.labels, activation=head.activation, classifier=head
    )


def _classification(
    checkpoint: Checkpoint, row: Architecture, reranker: Reranker | None, token_id: Callable[[str], int | None]
) -> Purpose:
    """A head over one text or a pair: the checkpoint's own, or a language model's logits of a few tokens."""
    folder, config = checkpoint.layout.transformer, checkpoint.config
    if reranker is not None and reranker.tokens:
        head = _token_head(checkpoint, reranker, token_id)
    else:
        converted = not (checkpoint.architecture or "").endswith("ForSequenceClassification")
        head = _labelled(classifiers.sequence_classifier, config, row, folder, converted=converted)
    return _scoring(head, template=None if reranker is None else reranker.template)


def _scoring(head: Classifier, *, template: ScoreTemplate | None = None, prompt: str = "") -> Purpose:
    tasks: set[Task] = {"classify", "token_classify"}
    if len(head.labels) == 1:
        tasks |= {"score", "reward"}
    return replace(
        _with_head(head, tasks),
        score_type="cross-encoder" if "score" in tasks else None,
        template=template,
        prompt=prompt,
    )


def _cross_encoder(
    checkpoint: Checkpoint, pairs: CrossEncoder, row: Architecture, token_id: Callable[[str], int | None]
) -> Purpose:
    """One of sentence-transformers' cross-encoders."""
    folder, config = pairs.transformer, checkpoint.config
    if pairs.kind == "feature-extraction":
        return _pooled(pairs)
    if pairs.kind == "sequence-classification":
        head = _labelled(classifiers.sequence_classifier, config, row, folder)
        head = replace(head, activation=pairs.activation_of(len(head.labels)))
        reranker = detect_reranker(checkpoint) if pairs.template is None else None
        template = pairs.template if reranker is None else reranker.template
        return _scoring(head, template=template, prompt=pairs.prompt)
    if not pairs.tokens:  # "yes" and "no" by their names
        purpose = _classification(checkpoint, row, detect_reranker(checkpoint), token_id)
        return replace(purpose, template=pairs.template or purpose.template)
    head = classifiers.token_scores(
        config, folder, pairs.tokens, difference=len(pairs.tokens) == 2, activation=pairs.activation_of(1)
    )
    return _scoring(head, template=pairs.template, prompt=pairs.prompt)


def _pooled(pairs: CrossEncoder) -> Purpose:
    """A bare encoder, whose last Dense gives the logits."""
    last = pairs.heads[-1]
    assert isinstance(last, Dense)  # the reader saw to it
    count = last.out_features
    tasks: frozenset[Task] = frozenset(("classify", "score", "reward") if count == 1 else ("classify",))
    return Purpose(
        tasks=tasks,
        score_type="cross-encoder" if count == 1 else None,
        labels=tuple(f"LABEL_{i}" for i in range(count)),
        activation=pairs.activation_of(count),
        pooled_logits=True,
        template=pairs.template,
        prompt=pairs.prompt,
    )


def _token_head(checkpoint: Checkpoint, reranker: Reranker, token_id: Callable[[str], int | None]) -> Classifier:
    ids = []
    for name in reranker.tokens:
        found = token_id(name)
        if found is None:
            raise ModelLoadError(
                f"{checkpoint.source.name} scores by the token {name!r}, which its vocabulary does not have; "
                'name others with hf_overrides={"classifier_from_token": [...]}'
            )
        ids.append(found)
    return classifiers.token_scores(
        checkpoint.config,
        checkpoint.layout.transformer,
        tuple(ids),
        difference=reranker.method == "from_2_way_softmax",
        activation=reranker.activation,
    )


class _Describes(Protocol):
    def __call__(self, config: Mapping[str, Any], row: str, folder: Path, *, decoder: bool) -> Classifier: ...


def _labelled(
    describe: _Describes, config: Mapping[str, Any], row: Architecture, folder: Path, *, converted: bool = False
) -> Classifier:
    """A head with labels, counted from its last tensor where config.json has neither names nor a number.

    transformers leaves both out of the file for two labels, its default. A ``converted`` checkpoint is of another class
    than the family's classifier, and may have a plain head.
    """
    found_in = _as_found if converted else _as_it_is
    head = found_in(describe(config, row.model_type, folder, decoder=row.decoder))
    last = head.steps[-1]
    if head.labels or not isinstance(last, Linear):
        return head
    shapes = tensor_shapes(folder)
    found = find_tensor(shapes, f"{last.name}.weight")
    count = 2 if found is None else shapes[found][0]  # a missing head is reported when it is built
    return found_in(describe({**config, "num_labels": count}, row.model_type, folder, decoder=row.decoder))


def _as_it_is(head: Classifier) -> Classifier:
    return head


def _as_found(head: Classifier) -> Classifier:
    """``head``, or the one linear that stands in its place in the weights, as vLLM's conversion has it."""
    plain = [replace(head, steps=(Linear(name=name, biased=False),), pool_logits=False) for name in ("score", "v_head")]
    return next((one for one in (head, *plain) if _is_there(one)), head)


def _is_there(head: Classifier) -> bool:
    """Whether the weights have every tensor that ``head`` needs."""
    shapes = tensor_shapes(head.folder)
    return all(find_tensor(shapes, f"{step.name}.weight") for step in head.steps if isinstance(step, Linear))


def with_pooling(head: Classifier, modes: tuple[PoolingMode, ...]) -> Classifier:
    """``head`` with the user's pooling.

    Raises:
        ModelLoadError: Several modes, which a classifier does not concatenate.
    """
    if len(modes) != 1:
        raise ModelLoadError(f"pooling={'+'.join(modes)!r}: a classifier pools one way; choose one of them")
    return replace(head, pooling=modes[0])
