"""Which of mteb's protocols a checkpoint serves, and which tasks it is measured on."""

from __future__ import annotations

from typing import Any

from mteb.abstasks.abstask import AbsTask
from mteb.abstasks.retrieval import AbsTaskRetrieval

from millpond.engine.engine import Engine
from millpond.errors import InvalidRequestError, UnsupportedTaskError
from millpond.mteb.base import EngineModel
from millpond.mteb.cross_encoder import MillpondCrossEncoder
from millpond.mteb.encoder import MillpondEncoder
from millpond.mteb.late_interaction import MillpondLateInteraction
from millpond.mteb.prompts import listed_options
from millpond.mteb.sparse import MillpondSparseEncoder
from millpond.mteb.task_data import parts_of
from millpond.values.spec import ModelSpec


def model_of(engine: Engine, *, dimensions: int | None = None) -> EngineModel:
    """The model of mteb that a checkpoint is.

    A published embedder gets the prompts or instructions that mteb's own list has for its name; another one has the
    prompts of its files.

    Args:
        engine: The engine.
        dimensions: Matryoshka width of an embedder's vectors.

    Returns:
        A cross-encoder, late interaction, an encoder, or a sparse encoder: the first that the checkpoint is.

    Raises:
        UnsupportedTaskError: It is none of them.
        InvalidRequestError: ``dimensions`` of anything but an embedder, or that its vectors cannot be cut to.
    """
    kind = class_of(engine.spec, dimensions=dimensions)
    options = {"embed_dim": dimensions, **listed_options(engine.spec)} if kind is MillpondEncoder else {}
    return kind(engine=engine, **options)


def class_of(spec: ModelSpec, *, dimensions: int | None = None) -> type[EngineModel]:
    """The class of :func:`model_of`, known before the model is loaded."""
    kind = _class_of(spec)
    if dimensions is not None and kind is not MillpondEncoder:
        raise InvalidRequestError(
            f"dimensions={dimensions} cuts the vector of a text, and {spec.name} is measured as {kind.model_type}; "
            "leave it out"
        )
    spec.check_dimensions(dimensions)
    return kind


def _class_of(spec: ModelSpec) -> type[EngineModel]:
    if spec.score_type in ("cross-encoder", "listwise"):
        return MillpondCrossEncoder
    if spec.score_type == "late-interaction":
        return MillpondLateInteraction
    kinds: tuple[type[EngineModel], ...] = (MillpondEncoder, MillpondSparseEncoder)
    for kind in kinds:
        if kind.task in spec.tasks:
            return kind
    raise UnsupportedTaskError(
        f"{spec.name} serves {', '.join(sorted(spec.tasks))}; mteb measures embedders, sparse encoders, "
        "late-interaction checkpoints and rerankers"
    )


def first_stage_class(spec: ModelSpec) -> type[EngineModel]:
    """The class of a model that finds candidates.

    Raises:
        InvalidRequestError: It only ranks.
    """
    kind = class_of(spec)
    if kind is MillpondCrossEncoder:
        raise InvalidRequestError(f"first_stage={spec.name} only ranks; name a model that searches, as an embedder")
    return kind


def searches(task: AbsTask) -> bool:
    """Whether a task searches a whole corpus, which a first stage can do; other tasks of retrieval list candidates."""
    return isinstance(task, AbsTaskRetrieval) and "Reranking" not in task.metadata.type


def check_task(kind: type[EngineModel], spec: ModelSpec, task: AbsTask, *, staged: bool) -> None:
    """Refuse a task that a model cannot be measured on, before any data is read.

    Raises:
        InvalidRequestError: The task has images, needs one vector of a text, or a first stage.
    """
    name, parts = f"{task.metadata.name} ({task.metadata.type})", parts_of(task)
    if unread := sorted({str(modality) for part in parts for modality in part.metadata.modalities} - {"text"}):
        raise InvalidRequestError(f"{name} has {', '.join(unread)}; millpond reads text only")
    if kind is not MillpondEncoder and not all(isinstance(part, AbsTaskRetrieval) for part in parts):
        raise InvalidRequestError(
            f"{name} compares one vector of each text, and {spec.name} is measured as {kind.model_type}: choose tasks "
            "of retrieval or reranking, or an embedder"
        )
    if staged and task.is_aggregate:
        raise InvalidRequestError(f"{name} is several tasks; with a first stage, name each of them")
    if kind is MillpondCrossEncoder and not staged and any(map(searches, parts)):
        raise InvalidRequestError(
            f"{name} searches a whole corpus, and {spec.name} only ranks: name the embedder whose best documents it "
            "ranks (--first-stage MODEL), or choose a task of reranking"
        )


def find_tasks(name: str) -> list[Any]:
    """The task of a name, or those of a benchmark.

    Raises:
        InvalidRequestError: mteb has neither.
    """
    import mteb

    try:
        return [mteb.get_task(name)]
    except KeyError as error:
        unknown = str(error.args[0])
    try:
        return list(mteb.get_benchmark(name).tasks)
    except KeyError:
        near = f"; did you mean {unknown.split(': ')[-1].rstrip('?')}?" if "Did you mean" in unknown else ""
        raise InvalidRequestError(
            f"mteb has no task and no benchmark {name!r}{near} (or name a BEIR folder, or a .tsv of pairs)"
        ) from None
