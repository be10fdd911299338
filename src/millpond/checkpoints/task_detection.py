"""Task detection: which tasks a checkpoint serves, by its architecture's name, its files and the user's ``convert``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from millpond.checkpoints import classifiers
from millpond.checkpoints.architecture import Architecture
from millpond.checkpoints.checkpoint import Checkpoint
from millpond.checkpoints.classifier_steps import Linear
from millpond.checkpoints.classifiers import Classifier
from millpond.checkpoints.layouts.cross_encoder import CrossEncoder
from millpond.checkpoints.layouts.sparse import SparseCode, Splade, StaticWeights
from millpond.checkpoints.modules import Dense
from millpond.checkpoints.rerankers import DEFAULT_TOKENS, Reranker, check_unknown, detect_reranker
from millpond.checkpoints.templates.score_template import ScoreTemplate
from millpond.checkpoints.weights import find_tensor, tensor_shapes
from millpond.errors import ModelLoadError, UnsupportedArchitectureError
from millpond.tasks import ScoreType, Task

# Said of a checkpoint whose template is needed, and not passed.
MISSING_TEMPLATE = (
    "{} scores pairs by a template that is not known here, and its files have none for sentence-transformers; pass it "
    "as score_template= (a Jinja file)"
)
_EMBED: frozenset[Task] = frozenset(("embed", "token_embed"))


@dataclass(frozen=True, kw_only=True)
class DetectedTasks:
    """The tasks of a checkpoint, and how it computes scores, classes and rewards."""

    tasks: frozenset[Task]  # the tasks it serves
    score_type: ScoreType | None  # how it scores a pair; `None`: it does not
    labels: tuple[str, ...] = ()  # class names by index
    activation: str = "identity"  # applied to its logits by default
    classifier: Classifier | None = None  # its classifier head; `None` if it has none
    pooled_logits: bool = False  # whether the pooled vector after its heads is the logits
    template: ScoreTemplate | None = None  # renders a pair as one text; `None`: the tokenizer encodes pairs
    needs_template: bool = False  # whether the user has to pass it
    parts: bool = False  # whether the text has two parts, which an encoder and a decoder read
    prompt: str = ""  # put before the query of every pair


def detect_tasks(
    checkpoint: Checkpoint, row: Architecture, *, convert: str, token_id: Callable[[str], int | None]
) -> DetectedTasks:
    """The tasks of ``checkpoint``."""
    layout, claimed = checkpoint.layout, checkpoint.architecture or row.model_class
    if layout.gliner is not None:
        return DetectedTasks(tasks=frozenset(("token_classify",)), score_type=None)
    if layout.listwise is not None:
        if convert != "auto":
            raise UnsupportedArchitectureError(
                f"{checkpoint.source.name} is a {claimed}, which ranks a list of documents and nothing else; leave "
                f"convert={convert!r} out"
            )
        return DetectedTasks(tasks=frozenset(("score",)), score_type="listwise")
    if row.encodes_apart:
        return _encoder_decoder(checkpoint, row, convert, token_id)
    if layout.static is not None and layout.static.bag is not None:  # a word's own vector says nothing
        return DetectedTasks(tasks=_EMBED - {"token_embed"}, score_type="bi-encoder")
    if convert == "embed":
        return DetectedTasks(tasks=_EMBED, score_type="bi-encoder")
    if isinstance(layout.sparse, Splade | StaticWeights | SparseCode) and convert == "auto":
        return DetectedTasks(tasks=frozenset(("sparse_embed",)), score_type=None)
    if layout.sparse is not None and convert == "auto":
        return DetectedTasks(tasks=_EMBED | {"sparse_embed"}, score_type="bi-encoder")
    if layout.late_interaction is not None and convert == "auto":
        return DetectedTasks(tasks=frozenset(("token_embed", "score")), score_type="late-interaction")
    if claimed.endswith(("RewardModel", "ForRewardModeling")):
        head = classifiers.reward_model(checkpoint.config, row, claimed, layout.transformer)
        if not claimed.endswith(("ForRewardModel", "ForProcessRewardModel")):
            head = _present_head(head)
            if not _has_tensors(head):
                return DetectedTasks(tasks=_EMBED, score_type="bi-encoder")
        return _with_head(head, _EMBED | {"reward", "token_classify"})
    if claimed.endswith("ForTokenClassification"):
        head = _labelled(classifiers.token_classifier, checkpoint.config, row, layout.transformer)
        if claimed != row.weighted_tokens or len(head.labels) > 1 or convert == "classify":
            return _with_head(head, {"token_classify"})
    if checkpoint.cross_encoder is not None:
        return _cross_encoder(checkpoint, checkpoint.cross_encoder, row, token_id)
    reranker = detect_reranker(checkpoint)
    is_classifier = claimed.endswith(("ForSequenceClassification", "ClassificationModel")) or convert == "classify"
    if is_classifier or (reranker is not None and layout.pooling is None):
        return _classification(checkpoint, row, reranker, token_id)
    if row.decoder and layout.normalize is None:  # no modules.json makes it an embedder
        check_unknown(checkpoint)
    return DetectedTasks(tasks=_EMBED, score_type="bi-encoder")


def _encoder_decoder(
    checkpoint: Checkpoint, row: Architecture, convert: str, token_id: Callable[[str], int | None]
) -> DetectedTasks:
    """An encoder of documents with a decoder of queries: nothing but scores of pairs."""
    reranker = detect_reranker(checkpoint)
    if reranker is None or not reranker.tokens or convert == "embed":
        raise UnsupportedArchitectureError(
            f"{checkpoint.source.name} is an encoder with a decoder that writes, of which millpond runs rerankers, for "
            "scores of pairs; if it is one, name its tokens with "
            'hf_overrides={"classifier_from_token": ["no", "yes"]} and its score_template='
        )
    detected = _classification(checkpoint, row, reranker, token_id)
    return replace(detected, tasks=frozenset(("score",)), parts=True)


def _with_head(head: Classifier, tasks: set[Task] | frozenset[Task]) -> DetectedTasks:
    return DetectedTasks(
        tasks=frozenset(tasks), score_type=None, labels=head.labels, activation=head.activation, classifier=head
    )


def _classification(
    checkpoint: Checkpoint, row: Architecture, reranker: Reranker | None, token_id: Callable[[str], int | None]
) -> DetectedTasks:
    """A head over one text or a pair: the checkpoint's own, or a language model's logits of a few tokens."""
    folder, config = checkpoint.layout.transformer, checkpoint.config
    if reranker is not None and reranker.tokens:
        _check_language_model(checkpoint, row)
        head = _token_head(checkpoint, reranker, token_id)
    elif reranker is not None and reranker.head:
        softcap = config.get("final_logit_softcapping")
        head = classifiers.single_logit(folder, reranker.head, softcap=softcap, activation=reranker.activation)
    else:
        converted = not (checkpoint.architecture or "").endswith("ForSequenceClassification")
        head = _labelled(classifiers.sequence_classifier, config, row, folder, converted=converted)
    if reranker is None:
        return _scoring(head)
    return replace(_scoring(head, template=reranker.template), needs_template=reranker.needs_template)


def _scoring(head: Classifier, *, template: ScoreTemplate | None = None, prompt: str = "") -> DetectedTasks:
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
) -> DetectedTasks:
    """The tasks of a cross-encoder saved by sentence-transformers."""
    folder, config = pairs.transformer, checkpoint.config
    if pairs.kind == "feature-extraction":
        return _pooled(pairs)
    if pairs.kind == "sequence-classification":
        head = _labelled(classifiers.sequence_classifier, config, row, folder)
        head = replace(head, activation=pairs.activation_of(len(head.labels)))
        reranker = detect_reranker(checkpoint) if pairs.template is None else None
        template = pairs.template if reranker is None else reranker.template
        return _scoring(head, template=template, prompt=pairs.prompt)
    if not pairs.tokens:  # the tokens "yes" and "no", looked up in the vocabulary
        by_default = Reranker(template=None, tokens=DEFAULT_TOKENS, method="from_2_way_softmax")
        detected = _classification(checkpoint, row, detect_reranker(checkpoint) or by_default, token_id)
        return replace(detected, template=pairs.template or detected.template)
    _check_language_model(checkpoint, row)
    head = classifiers.token_scores(
        config, folder, pairs.tokens, difference=len(pairs.tokens) == 2, activation=pairs.activation_of(1)
    )
    return _scoring(head, template=pairs.template, prompt=pairs.prompt)


def _pooled(pairs: CrossEncoder) -> DetectedTasks:
    """An encoder without a head of its class; its last Dense computes the logits."""
    last = pairs.heads[-1]
    assert isinstance(last, Dense)  # read_cross_encoder checked it
    count = last.out_features
    tasks: frozenset[Task] = frozenset(("classify", "score", "reward") if count == 1 else ("classify",))
    return DetectedTasks(
        tasks=tasks,
        score_type="cross-encoder" if count == 1 else None,
        labels=tuple(f"LABEL_{i}" for i in range(count)),
        activation=pairs.activation_of(count),
        pooled_logits=True,
        template=pairs.template,
        prompt=pairs.prompt,
    )


def _check_language_model(checkpoint: Checkpoint, row: Architecture) -> None:
    if not row.decoder:
        raise UnsupportedArchitectureError(
            f"{checkpoint.source.name}: {row.model_class} is an encoder, and only a language model scores pairs by "
            "tokens of its vocabulary; leave classifier_from_token out, and the checkpoint's own head scores them"
        )


def _token_head(checkpoint: Checkpoint, reranker: Reranker, token_id: Callable[[str], int | None]) -> Classifier:
    ids = []
    for token in reranker.tokens:
        number = token if isinstance(token, int) else token_id(token)
        if number is None:
            raise ModelLoadError(
                f"{checkpoint.source.name} scores by the token {token!r}, which its vocabulary does not have; "
                'name others with hf_overrides={"classifier_from_token": [...]}'
            )
        ids.append(number)
    return classifiers.token_scores(
        checkpoint.config,
        checkpoint.layout.transformer,
        tuple(ids),
        difference=reranker.method == "from_2_way_softmax",
        activation=reranker.activation,
        divisor=reranker.divisor,
    )


def _labelled(
    describe: Callable[[Mapping[str, Any], Architecture, Path], Classifier],
    config: Mapping[str, Any],
    row: Architecture,
    folder: Path,
    *,
    converted: bool = False,
) -> Classifier:
    """A head with labels. If config.json has neither their names nor their number, the last tensor's rows are counted.

    transformers leaves both out of the file for two labels, its default. The class of a ``converted`` checkpoint is not
    the family's classifier, so its head may be a plain linear.
    """
    head = describe(config, row, folder)
    head = _present_head(head) if converted else head
    last = head.steps[-1]
    if head.labels or not isinstance(last, Linear):
        return head
    shapes = tensor_shapes(folder)
    weight = find_tensor(shapes, f"{last.name}.weight")
    count = 2 if weight is None else shapes[weight][0]  # a missing head is reported when it is built
    head = describe({**config, "num_labels": count}, row, folder)
    return _present_head(head) if converted else head


def _present_head(head: Classifier) -> Classifier:
    """``head`` if the weights have its tensors, else a head of the single linear that they have, as in vLLM."""
    plain = [replace(head, steps=(Linear(name=name, biased=False),), pool_logits=False) for name in ("score", "v_head")]
    return next((candidate for candidate in (head, *plain) if _has_tensors(candidate)), head)


def _has_tensors(head: Classifier) -> bool:
    """Whether the weights have every tensor that ``head`` needs."""
    shapes = tensor_shapes(head.folder)
    return all(find_tensor(shapes, f"{step.name}.weight") for step in head.steps if isinstance(step, Linear))
