"""``millpond eval``: a model measured on tasks of mteb, or on files in their form."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from millpond.cli.arguments import options
from millpond.cli.arguments.groups import EngineOptions, grouped
from millpond.errors import MillpondError, MissingExtraError
from millpond.search.stored_model import describe_named

if TYPE_CHECKING:
    from millpond.mteb import TaskScores
    from millpond.mteb.base import EngineModel

logger = logging.getLogger(__name__)

# Printed beside the main score, where a task has them.
_ALSO = (
    *("ndcg_at_10", "recall_at_100", "mrr_at_10", "map_at_10", "cosine_spearman", "cosine_pearson"),
    *("accuracy", "f1", "v_measure", "max_ap"),
)
_HEADER = ("task", "type", "split", "main score")


@grouped
def evaluate(
    tasks: Annotated[
        list[str],
        typer.Argument(
            metavar="TASK",
            help="Names of mteb's tasks or benchmarks, BEIR folders (corpus.jsonl, queries.jsonl, qrels/test.tsv), and "
            ".tsv or .csv files with columns score, sentence1 and sentence2.",
        ),
    ],
    *,
    model: options.Model,
    dimensions: options.Width = None,
    first_stage: Annotated[
        str | None,
        typer.Option(
            help="The embedder whose best documents are ranked, for a reranker in tasks that search.", metavar="MODEL"
        ),
    ] = None,
    candidates: Annotated[
        int, typer.Option(help="Results that the stage before the last keeps.", metavar="N", min=1)
    ] = 100,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder for mteb's result files; those of the same model and data are not computed again.",
            metavar="FOLDER",
        ),
    ] = None,
    format: Annotated[Literal["table", "json"], typer.Option(help=options.FORMAT)] = "table",
    engine: EngineOptions,
) -> None:
    """Measure a model on tasks of mteb, or on your own data.

    An embedder is measured by one vector of each text, a ColBERT checkpoint by MaxSim, a sparse encoder by its weights,
    and a reranker on tasks that list candidates, or behind --first-stage. Prompts are those that mteb uses for the
    model. A task that cannot be read is reported, the others are measured, and the exit code is 1.
    """
    if find_spec("mteb") is None:
        raise MissingExtraError("millpond eval needs mteb: pip install 'millpond[mteb]'")
    spec = engine.describe(model)  # a mistake here is told before mteb is imported, which takes seconds
    from millpond.mteb.choice import check_task, class_of, first_stage_class

    kind = class_of(spec, dimensions=dimensions)
    if first_stage is not None:
        first_stage_class(describe_named(first_stage, engine.placement).spec)
    chosen = [task for name in tasks for task in _tasks(name)]
    for task in chosen:
        check_task(kind, spec, task, staged=first_stage is not None)
    with ExitStack() as stack:
        run = _Run(
            model=_opened(stack, model, engine.settings, dimensions=dimensions),
            first_stage=None if first_stage is None else _opened(stack, first_stage, engine.placement),
            candidates=candidates,
            output=output,
        )
        table = _Table(run.model, chosen) if format == "table" else None
        results: list[TaskScores] = []
        for rows in run.results(chosen):
            results += rows
            if table is not None:
                table.add(rows)
    if table is None:
        print(json.dumps({**run.facts, "results": [asdict(row) for row in results]}, ensure_ascii=False))
    if run.failed:
        raise typer.Exit(1)


def _tasks(name: str) -> list[Any]:
    """The tasks that a word of the command line stands for."""
    from millpond.mteb.beir import beir_task
    from millpond.mteb.choice import find_tasks
    from millpond.mteb.pairs import sts_task

    path = Path(name)
    if path.is_file() or path.suffix in (".tsv", ".csv"):
        return [sts_task(path)]
    if (path / "corpus.jsonl").is_file() or os.sep in name or name.startswith("."):
        return [beir_task(path)]
    return find_tasks(name)


def _opened(stack: ExitStack, model: str, settings: Mapping[str, Any], *, dimensions: int | None = None) -> EngineModel:
    from millpond.engine.engine import Engine
    from millpond.mteb.choice import model_of

    return model_of(stack.enter_context(Engine(model, **settings)), dimensions=dimensions)


@dataclass(kw_only=True)
class _Run:
    """A model and what it is measured with."""

    model: EngineModel
    first_stage: EngineModel | None
    candidates: int
    output: Path | None
    failed: int = 0

    def results(self, tasks: Sequence[Any]) -> Iterator[list[TaskScores]]:
        """The scores of each task; one whose data cannot be read is reported, unless it is the only one."""
        from millpond.mteb.evaluation import evaluate

        for task in tasks:
            try:
                yield evaluate(
                    self.model,
                    task,
                    output=self.output,
                    first_stage=self.first_stage,
                    candidates=self.candidates,
                    show_progress=True,
                )
            except MillpondError as error:
                if len(tasks) == 1:
                    raise
                self.failed += 1
                logger.error("%s", error)

    @property
    def facts(self) -> dict[str, Any]:
        """What was measured."""
        meta = self.model.mteb_model_meta
        staged = {} if self.first_stage is None else {"first_stage": self.first_stage.mteb_model_meta.name}
        return {
            "model": meta.name,
            "revision": meta.revision,
            "kind": self.model.model_type,
            "options": meta.experiment_kwargs or {},
            "mteb": version("mteb"),
            **staged,
        }


class _Table:
    """Rows that are printed as they come, in columns whose widths are known before."""

    def __init__(self, model: EngineModel, tasks: Sequence[Any]) -> None:
        meta = model.mteb_model_meta
        chosen = "".join(f", {name}={value}" for name, value in (meta.experiment_kwargs or {}).items())
        print(f"{meta.name}, {model.model_type}{chosen}, mteb {version('mteb')}\n")
        texts = [
            (task.metadata.name, task.metadata.type, *task.eval_splits, task.metadata.main_score) for task in tasks
        ]
        rows = [(*text[:2], max(text[2:-1], key=len), text[-1]) for text in texts]
        self._spans = [max(map(len, column)) for column in zip(*rows, _HEADER, strict=True)]
        self._print(*_HEADER, "score", "seconds", "also")

    def add(self, rows: Sequence[TaskScores]) -> None:
        """Print the scores of a task, a row for each split."""
        for row in rows:
            names = [name for name in _ALSO if name in row.scores and name != row.metric][:3]
            also = [f"{name} {row.scores[name]:.4f}" for name in names]
            seconds = "stored" if row.stored else f"{row.seconds:.1f}"
            self._print(row.task, row.type, row.split, row.metric, f"{row.score:.4f}", seconds, ", ".join(also))

    def _print(self, *cells: str) -> None:
        left = [cell.ljust(span) for cell, span in zip(cells[:-3], self._spans, strict=True)]
        print(*left, cells[-3].rjust(6), cells[-2].rjust(7), cells[-1], sep="  ", flush=True)
