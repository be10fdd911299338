"""Zero-shot classes: a model of natural language inference reads each text with a hypothesis for each label.

Labels, template and arithmetic are those of transformers' zero-shot-classification pipeline (Yin et al., 2019).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from millpond.engine.composite.gather import combine
from millpond.engine.input.model import LoadedModel
from millpond.engine.input.pair_tokenizer import PairTokenizer
from millpond.engine.input.plan import EncodesPairs
from millpond.engine.input.validate import check_unicode
from millpond.engine.schedule.timing import CallFuture, CallTimer
from millpond.errors import InvalidRequestError, UnsupportedTaskError
from millpond.values.inputs import Item, Pair
from millpond.values.outputs import ClassificationOutput
from millpond.values.params import PoolingParams
from millpond.vectors.activations import activate

FloatArray = npt.NDArray[np.float32]
# Queues the pairs of a call, to be read by the second argument; the timer is that of the whole call.
Queue = Callable[[Sequence[Pair], EncodesPairs | None, CallTimer], Future[ClassificationOutput]]

TEMPLATE = "This example is {}."


def check_model(loaded: LoadedModel) -> int:
    """Column of entailment, of a model that can read labels of the caller's."""
    spec = loaded.spec
    if spec.entailment_id is None:
        raise UnsupportedTaskError(
            f"{spec.name} has the labels {', '.join(spec.labels[:4])}, none of which begins with entail; labels= needs "
            'a model of natural language inference; leave labels out, or name them with hf_overrides={"label2id": ...}'
        )
    return spec.entailment_id


def hypotheses(items: Sequence[Item], params: PoolingParams) -> list[Pair]:
    """Each text with the hypothesis of each label, text by text."""
    assert params.labels is not None
    if params.activation not in (None, True):
        raise InvalidRequestError(
            f"activation={params.activation!r} means nothing beside labels, whose probabilities multi_label decides; "
            "leave it out"
        )
    template = TEMPLATE if params.template is None else params.template
    sentences = [template.replace("{}", label) for label in params.labels]
    for sentence in sentences:
        check_unicode(sentence, "the template with a label")
    pairs = []
    for i, item in enumerate(items):
        if not isinstance(item, str):
            raise InvalidRequestError(f"classify with labels takes a text at index {i}, not a {type(item).__name__}")
        pairs += [Pair(item, sentence) for sentence in sentences]
    return pairs


def reader(loaded: LoadedModel) -> EncodesPairs | None:
    """Reads a text and a hypothesis: only the text is cut. ``None``: as the checkpoint's template says."""
    pairs = loaded.encoder.pairs
    return pairs.keeping_document() if isinstance(pairs, PairTokenizer) else None


def classify(
    pairs: Sequence[Pair], params: PoolingParams, loaded: LoadedModel, queue: Queue, threads: Executor | None
) -> CallFuture[ClassificationOutput]:
    """The probability of each label for each text, from the entailment of ``pairs``, those of :func:`hypotheses`."""
    labels, column = params.labels, check_model(loaded)
    assert labels is not None
    timer = CallTimer()

    def assemble(outputs: list[ClassificationOutput]) -> ClassificationOutput:
        (output,) = outputs
        logits = output.probs.reshape(-1, len(labels), output.probs.shape[-1])  # [n, labels, classes]
        return replace(
            output,
            probs=probabilities(logits, column, multi_label=params.multi_label),
            labels=labels,
            truncated=np.logical_or.reduce(output.truncated.reshape(-1, len(labels)), axis=1),
        )

    return combine([lambda: queue(pairs, reader(loaded), timer)], assemble, threads, timer)


def probabilities(logits: FloatArray, entailment: int, *, multi_label: bool) -> FloatArray:
    """``[n, labels]`` from ``logits [n, labels, classes]``, whose column ``entailment`` counts.

    The entailments of a text's labels compete, or, with ``multi_label`` or one label, each with its own contradiction:
    the first column, or the last if the first is entailment.
    """
    if not multi_label and logits.shape[1] != 1:
        return activate(logits[..., entailment], "softmax")
    contradiction = -1 if entailment == 0 else 0
    two = np.stack((logits[..., contradiction], logits[..., entailment]), axis=-1)  # [n, labels, 2]
    out: FloatArray = np.ascontiguousarray(activate(two, "softmax")[..., 1])
    return out


def per_text(progress: Callable[[int], object] | None, labels: int) -> Callable[[int], None] | None:
    """A function told of finished pairs, which tells ``progress`` of finished texts."""
    if progress is None:
        return None
    lock, pairs = threading.Lock(), 0

    def update(count: int) -> None:
        nonlocal pairs
        with lock:
            texts = (pairs + count) // labels - pairs // labels
            pairs += count
        progress(texts)

    return update
