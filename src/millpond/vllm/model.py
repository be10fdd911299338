"""PoolingModel: an engine with vLLM's defaults and a pooler configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt

from millpond.engine.engine import Engine, submission_of, submit_part
from millpond.engine.schedule.timing import CallFuture
from millpond.errors import InputTooLongError, UnsupportedTaskError
from millpond.tasks import ScoreMethod, Task
from millpond.values.inputs import Item, Pair, TokenIds
from millpond.values.outputs import ScoreOutput
from millpond.values.params import PoolingParams
from millpond.vectors.activations import by_width
from millpond.vectors.ragged import Ragged
from millpond.vllm import arguments
from millpond.vllm.params import complete
from millpond.vllm.pooler_config import PoolerConfig
from millpond.vllm.prompts import Tokenization

Output = TypeVar("Output")


@dataclass(frozen=True, kw_only=True)
class Pending(Generic[Output]):
    """A queued call whose output still has to be calibrated."""

    future: CallFuture[Output]  # the engine's future; cancelling it drops what is still queued
    finish: Callable[[Output], Output]  # calibrates and activates the logits of the future's result
    finished: bool = False  # whether the result needs no calibration: finish returns it unchanged
    items: Sequence[Item] = ()

    def result(self) -> Output:
        """Wait for the result, calibrated."""
        return self.finish(self.future.result())


def rows_of_output(output: Any) -> Any:
    """The numbers of any kind of output: an array for each item."""
    return next(getattr(output, name) for name in ("embeddings", "rewards", "probs") if hasattr(output, name))


class PoolingModel:
    """One checkpoint with vLLM's defaults: over-long prompts are errors, and no prompt of the checkpoint is added."""

    def __init__(self, engine: Engine, config: PoolerConfig, *, task: str | None = None) -> None:
        self.engine = engine
        self.config = config
        self._task = task
        # Many requests have the same options, and to complete them costs a tenth of a short text.
        self._complete = lru_cache(64)(partial(complete, config=config, spec=engine.spec))

    def task(self, name: str | None) -> Task:
        """The task of an ``encode`` call by its present or older name, or by default."""
        chosen = name or self.config.task or self._task
        if chosen is None and self.config.returned_token_ids is not None:
            chosen = "token_classify"  # the configuration is for STEP pooling over a vocabulary
        return arguments.pooling_task(chosen, self.engine.tasks, model=self.engine.spec.name)

    def complete(self, task: Task, params: PoolingParams, tokenization: Tokenization) -> PoolingParams:
        """``params`` with the configured defaults, as :meth:`submit` takes them."""
        return self._complete(task, params, tokenization)

    def without_special_tokens(self, items: Sequence[Item], tokenization: Tokenization) -> list[Item]:
        """``items``; if ``tokenization`` leaves out special tokens, every text is replaced by its token ids."""
        if tokenization.special_tokens:
            return list(items)
        texts = iter(self.engine.tokenize([item for item in items if isinstance(item, str)], special_tokens=False))
        return [TokenIds(tuple(next(texts))) if isinstance(item, str) else item for item in items]

    def submit(self, task: Task, items: Sequence[Item], params: PoolingParams) -> Pending[Any]:
        """Queue one call; ``params`` from :meth:`complete`, ``items`` from :meth:`without_special_tokens`."""
        if params.long_texts is not None:
            self._check_embed_len(items)
        raw = self.config.calibrated and task in ("classify", "token_classify", "reward")
        engine_params = replace(params, activation=False) if raw else params
        future = submission_of(self.engine).start_here(self.engine_task(task, params), items, engine_params)
        return Pending(
            future=future,
            finish=lambda output: self._calibrated(output, params) if raw else output,
            finished=not raw,
            items=items,
        )

    def submit_score(
        self,
        pairs: Sequence[Pair],
        params: PoolingParams,
        *,
        template: str | None = None,
        method: ScoreMethod = "auto",
        indices: Sequence[int] | None = None,
    ) -> Pending[ScoreOutput]:
        """Queue the scoring of pairs; ``params`` from :meth:`complete`. Of an embedder they are cosines, as in vLLM.

        ``indices``: of the pairs among those of the caller, for errors, if they are not all of them.
        """
        if method == "auto" and self.engine.spec.score_type == "bi-encoder":
            method = "cosine"
        raw = self.config.calibrated and self.engine.spec.score_type == "cross-encoder"
        engine_params = replace(params, activation=False) if raw else params
        if template is None and indices is None:
            future = submission_of(self.engine).start_here("score", pairs, engine_params, method=method)
        else:
            future = submit_part(self.engine, "score", pairs, engine_params, indices, template=template, method=method)

        def finish(output: ScoreOutput) -> ScoreOutput:
            if not raw:
                return output
            scores = self.config.activate(output.scores[:, None], self._activation(params, 1))[:, 0]
            return replace(output, scores=scores)

        return Pending(future=future, finish=finish, finished=not raw, items=pairs)

    def engine_task(self, task: Task, params: PoolingParams) -> Task:
        """The engine's task; vLLM's ``reward`` gives a row for each token, even if the model rewards whole texts."""
        if task not in ("reward", "token_classify"):
            return task
        if params.returned_token_ids is not None and not self.engine.spec.labels:
            return "reward"  # logits of vocabulary entries, not of classes
        tasks = self.engine.tasks
        if task == "reward" and "token_classify" not in tasks:
            raise UnsupportedTaskError(
                f"{self.engine.spec.name} serves {', '.join(sorted(tasks))}, not reward; for a language model pass "
                'pooler_config={"pooling_type": "STEP", "step_tag_id": ..., "returned_token_ids": [...]}'
            )
        return "token_classify"

    def _calibrated(self, output: Any, params: PoolingParams) -> Any:
        """The output of a call, its logits shifted, scaled and activated."""
        name = "rewards" if hasattr(output, "rewards") else "probs"
        logits = getattr(output, name)
        flat = logits.flat if isinstance(logits, Ragged) else cast("npt.NDArray[np.float32]", logits)
        rows = self.config.activate(flat, self._activation(params, flat.shape[-1]))
        return replace(
            output, **{name: Ragged(flat=rows, offsets=logits.offsets) if isinstance(logits, Ragged) else rows}
        )

    def _activation(self, params: PoolingParams, width: int) -> str:
        """The activation to apply to ``width`` calibrated logits."""
        if isinstance(params.activation, str):
            return params.activation
        if not params.activation:
            return "identity"
        return self.engine.spec.activation if width == len(self.engine.spec.labels) else by_width(width)

    def _check_embed_len(self, items: Sequence[Item]) -> None:
        longest = self.config.max_embed_len
        if longest is None:
            return
        for i, item in enumerate(items):
            count = len(self.engine.tokenize([item])[0]) if isinstance(item, str) else 0
            if count > longest:
                raise InputTooLongError(
                    f"the prompt at index {i} has {count} tokens, more than max_embed_len={longest}; shorten it"
                )
