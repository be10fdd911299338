"""MillpondCrossEncoder: scores of pairs, for tasks that rerank."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from millpond.errors import UnsupportedTaskError
from millpond.mteb.base import EngineModel
from millpond.support.progress import draw_bar

Pairs = list[tuple[str, str]]
_PAIRS = 2048  # in a call: as many texts are in memory


class MillpondCrossEncoder(EngineModel):
    """A reranker: a cross-encoder, an LLM or a listwise model.

    A task of retrieval needs a first stage: mteb's ``task.convert_to_reranking(folder)``, or
    ``millpond.mteb.evaluate(..., first_stage=)``.
    """

    task = "score"
    model_type = "cross-encoder"

    def _check(self) -> None:
        super()._check()
        spec = self.engine.spec
        if spec.score_type not in ("cross-encoder", "listwise"):
            raise UnsupportedTaskError(
                f"{spec.name} is no cross-encoder (its scores are {spec.score_type}); millpond.mteb.model_of chooses "
                "the class by what a checkpoint is"
            )

    @property
    def similarity_name(self) -> None:
        """None: pairs are read together."""
        return None

    def predict(
        self,
        inputs1: Any,
        inputs2: Any,
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        prompt_type: Any = None,
        **kwargs: Any,
    ) -> npt.NDArray[np.float32]:
        """The score of each pair, ``[n]``.

        Args:
            inputs1: mteb's loader of the queries.
            inputs2: Its loader of the documents.
            task_metadata: The task; not read, like ``hf_split``, ``hf_subset`` and ``prompt_type``.
            hf_split: See there.
            hf_subset: See there.
            prompt_type: See there.
            **kwargs: ``show_progress_bar``.

        Returns:
            A score for each pair, in the order of the loaders.
        """
        scores = [np.empty(0, dtype=np.float32)]
        total = len(inputs1.dataset)
        with draw_bar(show=kwargs.get("show_progress_bar", True), total=total, unit=" pairs") as bar:
            for pairs in _calls(zip(_texts(inputs1), _texts(inputs2), strict=True)):
                queries, documents = zip(*pairs, strict=True)
                scores.append(self.engine.score(list(queries), list(documents)).scores)
                bar.update(len(pairs))
        return np.concatenate(scores)


def _texts(inputs: Any) -> Iterator[str]:
    return (text for batch in inputs for text in batch["text"])


def _calls(pairs: Iterator[tuple[str, str]]) -> Iterator[Pairs]:
    """Runs of pairs, all of a query in one: a listwise model compares the documents of a query."""
    run: Pairs = []
    for _, group in groupby(pairs, key=lambda pair: pair[0]):
        run += group
        if len(run) >= _PAIRS:
            yield run
            run = []
    if run:
        yield run
