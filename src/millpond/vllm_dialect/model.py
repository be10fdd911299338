"""PoolingModel: an engine with vLLM's defaults and pooler configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt

from millpond.engine.engine import Engine
from millpond.engine.schedule.timing import CallFuture
from millpond.errors import InputTooLongError, UnsupportedTaskError
from millpond.inputs import Item, Pair, TokenIds
from millpond.outputs import ScoreOutput
from millpond.params import PoolingParams
from millpond.pooling.activations import by_width
from millpond.ragged import Ragged
from millpond.tasks import Activation, Task
from millpond.vllm_dialect import arguments
from millpond.vllm_dialect.params import complete
from millpond.vllm_dialect.pooler_config import PoolerConfig
from millpond.vllm_dialect.prompts import Tokenization

Output = TypeVar("Output")


@dataclass(frozen=True, kw_only=True)
class Pending(Generic[Output]):
    """A queued call.

    Attributes:
        future: The engine's future; cancelling it drops the texts that still wait.
        finish: Turns the future's result into the output: logits are calibrated and activated here.
        finished: ``finish`` returns the result unchanged.
        items: The items of the call.
    """

    future: CallFuture[Output]
    finish: Callable[[Output], Output]
    finished: bool = False
    items: Sequence[Item] = ()

    def result(self) -> Output:
        """Wait for the output."""
        return self.finish(self.future.result())


class PoolingModel:
    """One checkpoint with vLLM's defaults: too long prompts are errors, and no prompt of the checkpoint is added.

    Args:
        engine: The engine; the caller closes it.
        config: Defaults for every request.
        task: Default task of ``encode``, from the older argument of that name.
    """

    def __init__(self, engine: Engine, config: PoolerConfig, *, task: str | None = None) -> None:
        self.engine = engine
        self.config = config
        self._task = task

    def task(self, name: str | None) -> Task:
        """The task of an ``encode`` call by its current or older name, or the default.

        Raises:
            InvalidRequestError: The name is unknown.
            UnsupportedTaskError: The model serves none of vLLM's tasks.
        """
        requested = name or self.config.task or self._task
        if requested is None and self.config.returned_token_ids is not None:
            requested = "token_classify"  # STEP pooling over a vocabulary is configured for logits, not vectors
        return arguments.pooling_task(requested, self.engine.tasks, model=self.engine.spec.name)

    def complete(self, task: Task, params: PoolingParams, how: Tokenization) -> PoolingParams:
        """Fill ``params`` with the configured defaults, for :meth:`submit`.

        Raises:
            InvalidRequestError: Options contradict the task, each other or the tokenization.
        """
        return complete(task, params, how, self.config, self.engine.spec)

    def bare(self, items: Sequence[Item], how: Tokenization) -> list[Item]:
        """``items``; without special tokens, texts are replaced by their token ids."""
        if how.special_tokens:
            return list(items)
        texts = iter(self.engine.tokenize([item for item in items if isinstance(item, str)], special_tokens=False))
        return [TokenIds(tuple(next(texts))) if isinstance(item, str) else item for item in items]

    def submit(self, task: Task, items: Sequence[Item], params: PoolingParams) -> Pending[Any]:
        """Queue a call; ``params`` from :meth:`complete`, ``items`` from :meth:`bare`.

        Raises:
            InvalidRequestError: An item or an option is invalid; nothing was queued.
            EngineOverloadedError: The queue is full.
        """
        if params.chunking is not None:
            self._check_embed_len(items)
        calibrate = self.config.calibrated and task in ("classify", "token_classify", "reward")
        engine_params = replace(params, activation=False) if calibrate else params
        future = self.engine.submit(self.native(task, params), items, engine_params)
        return Pending(
            future=future,
            finish=lambda output: self._calibrated(output, params) if calibrate else output,
            finished=not calibrate,
            items=items,
        )

    def submit_score(
        self, pairs: Sequence[Pair], params: PoolingParams, *, template: str | None = None
    ) -> Pending[ScoreOutput]:
        """Queue the scoring of pairs; ``params`` from :meth:`complete`.

        Args:
            pairs: (query, document) pairs.
            params: Options for all pairs.
            template: Replaces the checkpoint's score template.

        Raises:
            InvalidRequestError: A pair, an option or the template is invalid.
            EngineOverloadedError: The queue is full.
        """
        calibrate = self.config.calibrated and self.engine.spec.score_type == "cross-encoder"
        engine_params = replace(params, activation=False) if calibrate else params
        future = self.engine.submit_score(pairs, engine_params, template=template)

        def finish(output: ScoreOutput) -> ScoreOutput:
            if not calibrate:
                return output
            scores = self.config.activate(output.scores[:, None], self._activation(params, 1))[:, 0]
            return replace(output, scores=scores)

        return Pending(future=future, finish=finish, finished=not calibrate, items=pairs)

    def native(self, task: Task, params: PoolingParams) -> Task:
        """The engine's task for vLLM's; vLLM's ``reward`` returns a row per token for every model.

        Raises:
            UnsupportedTaskError: The checkpoint has no reward or classification head.
        """
        if task not in ("reward", "token_classify"):
            return task
        if params.returned_token_ids is not None and not self.engine.spec.labels:
            return "reward"  # vocabulary logits, not classes
        tasks = self.engine.tasks
        if task == "reward" and "token_classify" not in tasks:
            raise UnsupportedTaskError(
                f"{self.engine.spec.name} serves {', '.join(sorted(tasks))}, not reward; for a language model pass "
                'pooler_config={"pooling_type": "STEP", "step_tag_id": ..., "returned_token_ids": [...]}'
            )
        return "token_classify"

    def _calibrated(self, output: Any, params: PoolingParams) -> Any:
        """The output with its logits shifted, scaled and activated."""
        if hasattr(output, "rewards"):
            return replace(output, rewards=self._activated(output.rewards, params))
        return replace(output, probs=self._activated(output.probs, params))

    def _activated(self, logits: Any, params: PoolingParams) -> Any:
        flat = logits.flat if isinstance(logits, Ragged) else cast("npt.NDArray[np.float32]", logits)
        rows = self.config.activate(flat, self._activation(params, flat.shape[-1]))
        return Ragged(flat=rows, offsets=logits.offsets) if isinstance(logits, Ragged) else rows

    def _activation(self, params: PoolingParams, width: int) -> Activation:
        """The activation applied after calibrating ``width`` logits."""
        if isinstance(params.activation, str):
            return params.activation
        if not params.activation:
            return "identity"
        return self.engine.spec.activation if width == len(self.engine.spec.labels) else by_width(width)

    def _check_embed_len(self, items: Sequence[Item]) -> None:
        longest = self.config.max_embed_len
        if longest is None:
            return
        for index, item in enumerate(items):
            count = len(self.engine.tokenize([item])[0]) if isinstance(item, str) else 0
            if count > longest:
                raise InputTooLongError(
                    f"the prompt at index {index} has {count} tokens, more than max_embed_len={longest}; shorten it"
                )
