"""A model evaluated by mteb on a task, and its scores as plain numbers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import mteb
from mteb.abstasks.abstask import AbsTask
from mteb.results import TaskResult

from millpond.mteb.base import EngineModel
from millpond.mteb.choice import check_task, first_stage_class, searches
from millpond.mteb.task_data import reading
from millpond.support.progress import in_notebook

_READING = ("Data loading", "Dataset transform")
_TEXTS = 512  # that mteb's loaders hand over together


@dataclass(frozen=True, kw_only=True)
class TaskScores:
    """The scores of a model on a split of a task, means over its subsets.

    Attributes:
        task: Name of the task.
        type: ``Retrieval``, ``STS``, ...
        split: The split.
        metric: Name of the task's main score.
        score: The main score.
        scores: All scores by name.
        subsets: The main score of each subset, such as a language.
        seconds: What the evaluation took, of all splits, without reading the data.
        stored: Whether the result was read from the folder of an earlier run.
    """

    task: str
    type: str
    split: str
    metric: str
    score: float
    scores: Mapping[str, float]
    subsets: Mapping[str, float]
    seconds: float
    stored: bool


def evaluate(
    model: EngineModel,
    task: AbsTask,
    *,
    output: str | os.PathLike[str] | None = None,
    first_stage: EngineModel | None = None,
    candidates: int = 100,
    show_progress: bool = False,
) -> list[TaskScores]:
    """Evaluate a model on a task.

    Args:
        model: The model.
        task: A task of mteb, or one made of files.
        output: Folder for mteb's own result files; what it holds of the same model, options and data is not computed
            again.
        first_stage: The model whose best documents are ranked, in a task that searches a whole corpus.
        candidates: How many of them for a query.
        show_progress: Draw bars, if the output is a terminal or a notebook.

    Returns:
        The scores of each split.

    Raises:
        InvalidRequestError: The model does not serve this kind of task.
        SourceNotFoundError: The task's data cannot be read or fetched.
    """
    check_task(type(model), model.engine.spec, task, staged=first_stage is not None)
    if first_stage is not None:
        first_stage_class(first_stage.engine.spec)
    first = first_stage if searches(task) else None
    meta, cache = model.mteb_model_meta, None if output is None else mteb.ResultCache(output)
    if first is not None:
        model.name_experiment(first_stage=first.mteb_model_meta.name, candidates=candidates)
    shown = show_progress and (in_notebook() or (sys.stderr is not None and sys.stderr.isatty()))
    common: dict[str, Any] = {"co2_tracker": False, "show_progress_bar": False}
    try:
        found = None if cache is None else cache.load_task_result(task.metadata.name, model.mteb_model_meta)
        # mteb itself would take a complete result of other data, too.
        stored = found is not None and found.dataset_revision == task.metadata.revision
        with reading(task):
            if first is not None and not stored:
                with TemporaryDirectory() as folder:
                    loaders = _loaders(shown)
                    mteb.evaluate(first, task, cache=None, prediction_folder=folder, encode_kwargs=loaders, **common)
                    task.convert_to_reranking(folder, top_k=candidates)
            strategy = "only-missing" if stored else "always"
            loaders = _loaders(shown)
            results = mteb.evaluate(
                model, task, cache=cache, overwrite_strategy=strategy, encode_kwargs=loaders, **common
            ).task_results
    finally:
        model.mteb_model_meta = meta
    return [
        row
        for result in results
        for row in _rows(task, result, stored=stored and found is not None and result.date == found.date)
    ]


def _loaders(shown: bool) -> dict[str, Any]:
    return {"batch_size": _TEXTS, "show_progress_bar": shown}


def _rows(task: AbsTask, result: TaskResult, *, stored: bool) -> Iterator[TaskScores]:
    phases = [phase for phase in result.evaluation_phases or () if phase["name"] not in _READING]
    seconds = sum(phase["end"] - phase["start"] for phase in phases) or result.evaluation_time or 0.0
    for split, subsets in result.scores.items():
        names = [name for name, value in subsets[0].items() if isinstance(value, Real)]
        means = {name: fmean(each[name] for each in subsets if name in each) for name in names}
        yield TaskScores(
            task=result.task_name,
            type=task.metadata.type,
            split=split,
            metric=task.metadata.main_score,
            score=means.pop("main_score"),
            scores=means,
            subsets={each["hf_subset"]: each["main_score"] for each in subsets},
            seconds=seconds,
            stored=stored,
        )
