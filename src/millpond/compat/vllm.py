"""LLM: vLLM's offline class for pooling models, its present and its older spelling, over an Engine."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Self, cast

import numpy as np
import numpy.typing as npt
import torch
from tqdm import tqdm

from millpond.compat.vllm_outputs import (
    ClassificationData,
    EmbeddingData,
    PoolingData,
    RequestOutput,
    ScoringData,
)
from millpond.compat.vllm_pooler import PoolerConfig
from millpond.compat.vllm_prompts import Tokenization, read_prompts, read_texts
from millpond.engine.engine import Engine
from millpond.engine.items import Item, TokenIds
from millpond.engine.scoring import pair_up
from millpond.errors import InvalidRequestError, UnsupportedTaskError
from millpond.params import PoolingParams
from millpond.pooling.activations import by_width
from millpond.tasks import Activation, Task

# vLLM's arguments about memory, parallelism and compilation: nothing here depends on them.
_KNOBS = frozenset(
    "block_size disable_custom_all_reduce disable_log_stats enable_chunked_prefill enable_prefix_caching enforce_eager "
    "gpu_memory_utilization kv_cache_dtype load_format max_num_batched_tokens max_num_seqs "
    "max_seq_len_to_capture model_impl pipeline_parallel_size seed swap_space tensor_parallel_size "
    "tokenizer_mode compilation_config cpu_offload_gb distributed_executor_backend disable_log_requests".split()
)
_OLD_TASKS = {"embedding": "embed", "score": "classify", "reward": "token_classify", "encode": None, "plugin": None}
_PREFERENCE: tuple[Task, ...] = ("embed", "classify", "token_embed", "token_classify", "reward")

Params = PoolingParams | Sequence[PoolingParams] | None
Rows = npt.NDArray[np.float32]


class LLM:
    """vLLM's ``LLM`` for pooling models: its code runs with the import changed.

    Deliberate differences: a reranker's own template is applied unless another is passed, ColBERT encodes as its
    checkpoint says, rewards are raw unless ``use_activation=True``, and one object serves every task. As in vLLM,
    over-long prompts are errors unless truncation is asked for.

    Args:
        model: Hub id or local folder.
        runner: ``auto`` or ``pooling``.
        convert: ``auto``, ``embed``, ``classify`` or ``none``.
        task: The older word for the conversion.
        trust_remote_code: Accepted, and never needed: no code of a checkpoint is run.
        hf_overrides: Merged into config.json.
        pooler_config: A dict or its JSON; see :class:`~millpond.compat.vllm_pooler.PoolerConfig`.
        override_pooler_config: Its older name.
        dtype: As :class:`millpond.Engine`; also ``half`` and ``float``.
        max_model_len: Most tokens per prompt.
        revision: Branch, tag or commit of a hub id.
        device: As :class:`millpond.Engine`.
        quantization: As :class:`millpond.Engine`.
        **knobs: vLLM's resource arguments, such as ``gpu_memory_utilization``, change nothing here and are named in one
            warning; anything else is refused.

    Raises:
        TypeError: An argument that neither vLLM nor millpond has.
        InvalidRequestError: An option that makes no sense.
        ModelLoadError: As :class:`millpond.Engine`.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        runner: str = "auto",
        convert: str = "auto",
        task: str | None = None,
        trust_remote_code: bool = False,
        hf_overrides: Mapping[str, Any] | None = None,
        pooler_config: Any = None,
        override_pooler_config: Any = None,
        dtype: str = "auto",
        max_model_len: int | None = None,
        revision: str | None = None,
        device: str = "auto",
        quantization: str | None = None,
        **knobs: Any,
    ) -> None:
        if runner not in ("auto", "pooling"):
            raise InvalidRequestError(f"runner={runner!r}: millpond pools; choose auto or pooling")
        if convert not in ("auto", "embed", "classify", "none", "reward"):
            raise InvalidRequestError(f"convert={convert!r} is unknown; choose auto, embed, classify or none")
        if not isinstance(trust_remote_code, bool):
            raise InvalidRequestError(f"trust_remote_code={trust_remote_code!r} must be True or False")
        _check_knobs(knobs)
        self.pooler_config = PoolerConfig.of(override_pooler_config if pooler_config is None else pooler_config)
        self.engine = Engine(
            model,
            revision=revision,
            device=device,
            dtype={"half": "float16", "float": "float32"}.get(dtype, dtype),
            max_length=max_model_len,
            pooling=self.pooler_config.pooling,
            convert=_conversion(convert, task),
            hf_overrides=hf_overrides,
            quantization=quantization,
        )
        self._task = task
        self._numbers = itertools.count()

    def embed(
        self,
        prompts: Any,
        *,
        pooling_params: Params = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """A vector for each prompt, as ``.outputs.embedding``."""
        outputs = self._each("embed", prompts, pooling_params, tokenization_kwargs, use_tqdm)
        return [self._output(EmbeddingData(embedding=rows.tolist()), ids) for rows, ids in outputs]

    def classify(
        self,
        prompts: Any,
        *,
        pooling_params: Params = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Probabilities of the classes for each prompt, as ``.outputs.probs``."""
        outputs = self._each("classify", prompts, pooling_params, tokenization_kwargs, use_tqdm)
        return [self._output(ClassificationData(probs=rows.tolist()), ids) for rows, ids in outputs]

    def reward(
        self,
        prompts: Any,
        *,
        pooling_params: Params = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """A row of rewards for each token (or step), as the tensor ``.outputs.data``; raw by default."""
        outputs = self._each("reward", prompts, pooling_params, tokenization_kwargs, use_tqdm)
        return [self._output(PoolingData(data=torch.from_numpy(rows.copy())), ids) for rows, ids in outputs]

    def encode(
        self,
        prompts: Any,
        pooling_params: Params = None,
        *,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Any task's result for each prompt, as the tensor ``.outputs.data``."""
        task = self._encode_task(pooling_task, pooling_params)
        outputs = self._each(task, prompts, pooling_params, tokenization_kwargs, use_tqdm)
        return [self._output(PoolingData(data=torch.from_numpy(rows.copy())), ids) for rows, ids in outputs]

    def score(
        self,
        data_1: Any,
        data_2: Any,
        /,
        *,
        pooling_params: PoolingParams | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """A score for each pair (1-1, 1-N, N-N), as ``.outputs.score``."""
        pairs = pair_up(read_texts(data_1, "data_1"), read_texts(data_2, "data_2"))
        params = self._params("score", pooling_params or PoolingParams(), Tokenization.of(tokenization_kwargs))
        raw = self.pooler_config.calibrated and self.engine.spec.score_type == "cross-encoder"
        wanted = self._wanted("score", params)
        if raw:
            params = replace(params, activation=False)
        scored = self.engine.submit_score(pairs, params, template=chat_template).result()
        scores: Rows = scored.scores
        if raw:
            scores = self.pooler_config.activate(scores[:, None], wanted)[:, 0]
        return [
            self._output(ScoringData(score=float(score)), self._ids_of("score", pair, params))
            for score, pair in zip(scores, pairs, strict=True)
        ]

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer of the checkpoint."""
        return self.engine.tokenizer

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _each(
        self, task: Task, prompts: Any, params: Params, tokenization: Mapping[str, Any] | None, use_tqdm: bool
    ) -> list[tuple[Rows, Callable[[], list[int]]]]:
        """Every prompt's rows, and how to find its token ids."""
        items, how = self._items(read_prompts(prompts), Tokenization.of(tokenization))
        wanted = [self._params(task, each, how) for each in _per_prompt(params, len(items))]
        groups: dict[PoolingParams, list[int]] = {}
        for i, each in enumerate(wanted):
            groups.setdefault(each, []).append(i)
        futures: list[tuple[PoolingParams, list[int], Future[Any]]] = []
        found: list[Rows | None] = [None] * len(items)
        try:
            for each, places in groups.items():
                futures.append((each, places, self._submit(task, [items[i] for i in places], each)))
            with tqdm(total=len(items), desc="Pooling", disable=None if use_tqdm else True) as bar:
                for each, places, future in futures:
                    for i, rows in zip(places, self._rows(task, future.result(), each), strict=True):
                        found[i] = rows
                    bar.update(len(places))
        except BaseException:
            for _, _, future in futures:
                future.cancel()  # one prompt is refused: nobody waits for the others
            raise
        return [
            (one, self._ids_of(task, item, each))
            for one, item, each in zip(cast("list[Rows]", found), items, wanted, strict=True)
        ]

    def _items(self, items: list[Item], how: Tokenization) -> tuple[list[Item], Tokenization]:
        if how.special_tokens:
            return items, how
        texts = [item for item in items if isinstance(item, str)]
        bare = iter(self.engine.tokenize(texts, special_tokens=False))
        return [TokenIds(tuple(next(bare))) if isinstance(item, str) else item for item in items], how

    def _params(self, task: Task, params: PoolingParams, how: Tokenization) -> PoolingParams:
        """A request's options, with the configured ones where it leaves a question open."""
        config = self.pooler_config
        changes: dict[str, Any] = {"task": None}
        if params.truncate_prompt_tokens is None:
            changes["truncate"] = how.truncate
            changes["truncate_prompt_tokens"] = how.limit
        if task in ("embed", "token_embed"):
            if params.dimensions is None:
                changes["dimensions"] = config.dimensions
            # activation is what older versions called the normalization of a vector.
            switch = params.use_activation if isinstance(params.activation, str | None) else params.activation
            switch = config.use_activation if switch is None else switch
            changes |= {"activation": None, "use_activation": switch if params.normalize is None else None}
            if task == "embed" and config.chunked:
                changes |= {"chunking": "mean", "truncate": "end"}
            return replace(params, **changes)
        changes |= {"normalize": None, "dimensions": None}
        if params.activation is None:
            switch = params.use_activation if params.normalize is None else params.normalize
            default = config.use_activation if task != "reward" or config.use_activation else False
            changes["activation"] = default if switch is None else switch
        changes["use_activation"] = None
        if task in ("token_classify", "reward"):
            changes |= config.steps(params) if config.step else {}
            if params.step_tag_id is None and not config.step:
                changes["step_tag_id"] = self.engine.spec.step_tag_id
        return replace(params, **changes)

    def _submit(self, task: Task, items: list[Item], params: PoolingParams) -> Future[Any]:
        if params.chunking is not None and self.pooler_config.max_embed_len is not None:
            self._check_embed_len(items)
        if self.pooler_config.calibrated and task in ("classify", "token_classify", "reward"):
            params = replace(params, activation=False)
        return self.engine.submit(self._native(task, params), items, params)

    def _native(self, task: Task, params: PoolingParams) -> Task:
        """``reward`` in vLLM is a row for each token."""
        if task != "reward" or params.returned_token_ids is not None:
            return task
        tasks = self.engine.tasks
        if "token_classify" not in tasks:
            raise UnsupportedTaskError(
                f"{self.engine.spec.name} serves {', '.join(sorted(tasks))}, not reward; for a language model pass "
                'pooler_config={"pooling_type": "STEP", "step_tag_id": ..., "returned_token_ids": [...]}'
            )
        return "token_classify"

    def _rows(self, task: Task, output: Any, params: PoolingParams) -> list[Rows]:
        """A call's output as an array for each prompt."""
        if hasattr(output, "embeddings"):
            return list(output.embeddings)
        rows: list[Rows] = list(output.rewards) if hasattr(output, "rewards") else list(output.probs)
        if self.pooler_config.calibrated:
            return [self.pooler_config.activate(one, self._wanted(task, params, one.shape[-1])) for one in rows]
        return rows

    def _wanted(self, task: Task, params: PoolingParams, width: int | None = None) -> Activation:
        """The activation behind a calibration."""
        asked = params.activation if params.activation is not None else task != "reward"
        if isinstance(asked, str):
            return asked
        if not asked:
            return "identity"
        spec = self.engine.spec
        return spec.activation if width is None or width == len(spec.labels) else by_width(width)

    def _check_embed_len(self, items: Sequence[Item]) -> None:
        longest = self.pooler_config.max_embed_len
        assert longest is not None
        texts = [item for item in items if isinstance(item, str)]
        for i, ids in enumerate(self.engine.tokenize(texts)):
            if len(ids) > longest:
                raise InvalidRequestError(
                    f"the prompt at index {i} has {len(ids)} tokens, more than max_embed_len={longest}; shorten it"
                )

    def _encode_task(self, named: str | None, params: Params) -> Task:
        """The task of an ``encode`` call: the argument's, the params', the configured one, or the model's first."""
        first = params if isinstance(params, PoolingParams | None) else (params[0] if params else None)
        asked = named or (first.task if first is not None else None) or self.pooler_config.task or self._task
        task = _OLD_TASKS.get(asked, asked) if asked is not None else None
        if task is None:
            served = [task for task in _PREFERENCE if task in self.engine.tasks]
            if not served:
                raise UnsupportedTaskError(f"{self.engine.spec.name} serves {', '.join(self.engine.tasks)}; name one")
            return "token_embed" if "embed" not in self.engine.tasks and served == ["token_embed"] else served[0]
        return cast("Task", task)

    def _ids_of(self, task: Task, item: Item, params: PoolingParams) -> Callable[[], list[int]]:
        return lambda: self.engine.token_ids(self._native(task, params), item, params)

    def _output(self, data: Any, tokenize: Callable[[], list[int]]) -> RequestOutput:
        return RequestOutput(request_id=str(next(self._numbers)), outputs=data, tokenize=tokenize)


def _per_prompt(params: Params, count: int) -> list[PoolingParams]:
    if params is None or isinstance(params, PoolingParams):
        return [params or PoolingParams()] * count
    listed = list(params)
    if len(listed) != count:
        raise InvalidRequestError(f"{len(listed)} pooling_params for {count} prompts; pass one, or one for each prompt")
    return listed


def _conversion(convert: str, task: str | None) -> str:
    if convert != "auto":
        return {"none": "auto", "reward": "embed"}.get(convert, convert)
    return {"embed": "embed", "embedding": "embed", "classify": "classify", "score": "classify"}.get(task or "", "auto")


def _check_knobs(knobs: Mapping[str, Any]) -> None:
    unknown = sorted(knobs.keys() - _KNOBS)
    if unknown:
        raise TypeError(f"LLM has no argument {unknown[0]!r}")
    if knobs.get("tensor_parallel_size", 1) != 1 or knobs.get("pipeline_parallel_size", 1) != 1:
        raise InvalidRequestError(
            "tensor_parallel_size and pipeline_parallel_size above 1 are not available: a model runs on one device"
        )
    if knobs:
        warnings.warn(f"no meaning here, and ignored: {', '.join(sorted(knobs))}", UserWarning, stacklevel=3)
