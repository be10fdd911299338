"""The stages of a search as options of a command, and what people are told of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import typer

from millpond.cli.arguments import options
from millpond.cli.arguments.options import option
from millpond.cli.output.results_table import score_name
from millpond.ingest.sinks.parents import Expand
from millpond.search.stages import Answer, SearchStages, StagePlan
from millpond.support.filters import no_match
from millpond.values.fingerprint import stored_name

RERANK = (
    "Score what is found again: by a cross-encoder, an LLM reranker or a ColBERT checkpoint, or, as 'self', by the "
    "token vectors of the collection's model."
)
"""What --rerank is, for a command's help."""


@dataclass(frozen=True, kw_only=True)
class StageOptions(StagePlan):
    """What the stages of a search are, and which records are printed."""

    k: options.K = 10
    threshold: float | None = option(None, "Print records of at least this score.", "SCORE")
    per_record: bool = option(False, "Print a record of several chunks once, by its best chunk.", flags="--per-record")
    expand: Expand | None = option(
        None, "Print the whole text of the record (parent) of each chunk, each record once.", flags="--expand"
    )
    coarse_to_fine: bool | None = option(
        None,
        "Find candidates by the smallest width and score them by the largest, or search that one alone (default: the "
        "former, but for Qdrant's local mode and Milvus Lite, which compare every row).",
        flags="--coarse-to-fine/--no-coarse-to-fine",
    )
    hybrid: bool | None = option(
        None,
        "Fuse the ranking with that of sparse vectors (default: if the collection has them).",
        flags="--hybrid/--no-hybrid",
    )
    rerank: str | None = option(
        None,
        RERANK,
        "MODEL",
    )
    candidates: int | None = option(
        None,
        "Results that the stage before the last keeps.",
        "N",
        min=1,
        show_default="coarse to fine 10 k, at least 100; for --rerank 5 k, at least 50",
    )
    method: options.Method = "auto"
    instruction: options.Instruction = None
    budget_ms: options.BudgetMs = None
    model: options.StoredModel = None
    sparse_model: options.SparseModel = None

    def check(self) -> None:
        """Refuse options that contradict each other, before anything is opened."""
        if self.candidates is not None and self.candidates < self.k:
            raise typer.BadParameter(f"{self.candidates} is less than --k {self.k}", param_hint="--candidates")
        if self.threshold is not None and not math.isfinite(self.threshold):
            raise typer.BadParameter(f"{self.threshold} is not a score", param_hint="--threshold")
        if self.rerank is not None and not self.rerank.strip():
            raise typer.BadParameter("it is blank; name a model, or write self", param_hint="--rerank")
        for name, given in (
            ("--method", self.method != "auto"),
            ("--instruction", self.instruction is not None),
            ("--budget-ms", self.budget_ms is not None),
        ):
            if given and self.rerank is None:
                raise typer.BadParameter("it is an option of the second stage; name --rerank, too", param_hint=name)


def title_of(stages: SearchStages) -> str:
    """What ranks the hits, for people."""
    manifest = stages.sink.open()
    widths = stages.sink.dimensions or manifest.dimensions
    asked = stages.plan.coarse_to_fine
    staged = len(widths) > 1 and (not stages.sink.exhaustive if asked is None else asked)
    shown = f"{widths[0]}, then {widths[-1]}" if staged else str(widths[-1])
    title = f"by {'the fused ranks of sparse vectors and ' if stages.hybrid else ''}cosine at {shown}"
    spec = stages.engine.spec
    title += f" ({manifest.model if spec.fingerprint == manifest.fingerprint else stored_name(spec)})"
    if stages.rerank_engine is not None:
        spec = stages.rerank_engine.spec
        title += f", then by {score_name(spec, stages.plan.method)} ({stored_name(spec)})"
    if stages.plan.budget_ms is not None:
        title += f" within {stages.plan.budget_ms:g} ms"
    return title


def why_none(stages: SearchStages, answer: Answer) -> str:
    """Why there is nothing to print."""
    where = f"question {answer.query_id}: "
    if answer.best is not None and math.isnan(answer.best):
        return f"{where}no hit was scored within --budget-ms {stages.plan.budget_ms:g}, so none reaches --threshold"
    if answer.best is not None:
        return f"{where}no score reaches --threshold {stages.plan.threshold:g}; the best is {answer.best:.4g}"
    if stages.filter:
        return where + no_match(stages.filter)
    return f"{where}collection {stages.sink.collection!r} is empty"
