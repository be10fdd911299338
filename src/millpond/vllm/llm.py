"""LLM: vLLM's offline class for pooling models, with its present and its older names, over an Engine."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack, cast

import numpy as np
import numpy.typing as npt

from millpond.engine.composite.scoring import pair_up, vector_params
from millpond.engine.engine import Engine
from millpond.errors import InvalidRequestError, MissingExtraError
from millpond.support.progress import draw_bar
from millpond.tasks import Task
from millpond.values.inputs import Item, Pair
from millpond.values.params import PoolingParams
from millpond.values.replacements import names_replacements
from millpond.vllm import arguments
from millpond.vllm.model import Pending, PoolingModel, rows_of_output
from millpond.vllm.outputs import ClassificationData, EmbeddingData, PoolingData, RequestOutput, ScoringData
from millpond.vllm.params import Params, per_prompt
from millpond.vllm.pooler_config import PoolerConfig
from millpond.vllm.prompts import Tokenization, read_prompts, read_texts

if TYPE_CHECKING:
    import torch

FloatArray = npt.NDArray[np.float32]


class PromptOptions(TypedDict, total=False):
    """The options of :meth:`LLM.embed`, :meth:`LLM.classify` and :meth:`LLM.reward`.

    Attributes:
        pooling_params: :class:`~millpond.PoolingParams`, one or one for each prompt.
        tokenization_kwargs: Any of ``truncation``, ``max_length``, ``truncate_prompt_tokens``, ``truncation_side`` and
            ``add_special_tokens``. Without truncation a prompt that is too long is an error.
        truncate_prompt_tokens: Cut to this many tokens; -1 is the model's maximum.
        use_tqdm: Draw a progress bar, if the output is a terminal or a notebook.
    """

    pooling_params: Params
    tokenization_kwargs: Mapping[str, Any] | None
    truncate_prompt_tokens: int | None
    use_tqdm: bool


@names_replacements
class LLM:
    """vLLM's ``LLM`` for pooling models: code for it runs with only the import changed.

    Deliberate differences: a reranker's own template is applied unless another is passed, ColBERT encodes as its
    checkpoint says, rewards are raw unless ``use_activation=True``, and one object serves every task. As in vLLM,
    over-long prompts are errors unless the caller asks for truncation.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        convert: str = "auto",
        task: str | None = None,
        pooler_config: Any = None,
        override_pooler_config: Any = None,
        runner: str = "auto",
        trust_remote_code: bool = False,
        **options: Any,
    ) -> None:
        """Load a model.

        Args:
            model: Hub id or local folder.
            convert: ``auto``, ``embed``, ``classify`` or ``none``.
            task: The older name of ``convert``.
            pooler_config: A dict or its JSON; see :class:`~millpond.vllm.pooler_config.PoolerConfig`.
            override_pooler_config: Its older name.
            runner: ``auto`` or ``pooling``.
            trust_remote_code: Accepted, and never needed: millpond runs no code of a checkpoint.
            **options: ``dtype``, also ``half`` and ``float``; ``max_model_len``, most tokens per prompt; ``revision``,
                ``device``, ``quantization`` and ``hf_overrides`` as :class:`millpond.Engine`. vLLM's resource
                arguments, such as ``gpu_memory_utilization``, change nothing here and are named in one warning.

        Raises:
            TypeError: An argument that neither vLLM nor millpond has.
            InvalidRequestError: An invalid option.
            ModelLoadError: As :class:`millpond.Engine`.
        """
        arguments.check_flags(runner=runner, trust_remote_code=trust_remote_code)
        engine_args = arguments.engine_args(options)
        self.pooler_config = PoolerConfig.of(override_pooler_config if pooler_config is None else pooler_config)
        conversion = arguments.conversion(convert, task)
        self.engine = Engine(model, pooling=self.pooler_config.pooling, convert=conversion, **engine_args)
        self._model = PoolingModel(self.engine, self.pooler_config, task=None if task == "auto" else task)
        self._numbers = itertools.count()

    def embed(self, prompts: Any, **options: Unpack[PromptOptions]) -> list[RequestOutput]:
        """A vector for each prompt, as ``.outputs.embedding``.

        Args:
            prompts: A str, ``{"prompt": ...}``, ``{"prompt_token_ids": [...]}``, token ids, or a list of these.
            **options: See :class:`PromptOptions`.

        Returns:
            One output for each prompt; ``.outputs.embedding`` is a list of ``d`` floats.

        Raises:
            InvalidRequestError: A prompt or an option that cannot be served.
            UnsupportedTaskError: The checkpoint does not embed.
        """
        outputs = self._each("embed", prompts, **options)
        return [self._output(EmbeddingData(embedding=rows.tolist()), ids) for rows, ids in outputs]

    def classify(self, prompts: Any, **options: Unpack[PromptOptions]) -> list[RequestOutput]:
        """Probabilities of the classes for each prompt, as the list ``.outputs.probs``; otherwise as :meth:`embed`.

        Args:
            prompts: As :meth:`embed`.
            **options: See :class:`PromptOptions`.

        Returns:
            One output for each prompt; ``.outputs.probs`` is a list of a float for each class.
        """
        outputs = self._each("classify", prompts, **options)
        return [self._output(ClassificationData(probs=rows.tolist()), ids) for rows, ids in outputs]

    def reward(self, prompts: Any, **options: Unpack[PromptOptions]) -> list[RequestOutput]:
        """A row of rewards for each token (or step), raw by default; otherwise as :meth:`embed`.

        Args:
            prompts: As :meth:`embed`.
            **options: See :class:`PromptOptions`.

        Returns:
            One output for each prompt; ``.outputs.data`` is a float32 tensor ``[tokens, columns]``, or
            ``[steps, columns]``.

        Raises:
            MissingExtraError: torch, whose tensors these are, is not installed.
        """
        tensor = _from_numpy("reward")
        return [
            self._output(PoolingData(data=tensor(rows.copy())), ids)
            for rows, ids in self._each("reward", prompts, **options)
        ]

    def encode(
        self,
        prompts: Any,
        pooling_params: Params = None,
        *,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The result of any task for each prompt, as the tensor ``.outputs.data``; otherwise as :meth:`embed`.

        Args:
            prompts: As :meth:`embed`.
            pooling_params: :class:`~millpond.PoolingParams`, one or one for each prompt.
            pooling_task: ``embed``, ``classify``, ``token_embed`` or ``token_classify``, or an older name; by default
                the task of ``pooling_params``, of ``pooler_config``, or the first that the model serves.
            tokenization_kwargs: See :class:`PromptOptions`.
            truncate_prompt_tokens: See :class:`PromptOptions`.
            use_tqdm: See :class:`PromptOptions`.

        Returns:
            One output for each prompt; ``.outputs.data`` is a float32 tensor: a vector ``[d]``, probabilities
            ``[classes]``, or for a task of tokens ``[tokens, d]`` or ``[tokens, classes]``.

        Raises:
            MissingExtraError: torch, whose tensors these are, is not installed.
        """
        tensor = _from_numpy("encode")
        params = [pooling_params] if isinstance(pooling_params, PoolingParams | None) else list(pooling_params)
        named = next((each.task for each in params[:1] if each is not None), None)
        outputs = self._each(
            self._model.task(pooling_task or named),
            prompts,
            pooling_params=pooling_params,
            tokenization_kwargs=tokenization_kwargs,
            truncate_prompt_tokens=truncate_prompt_tokens,
            use_tqdm=use_tqdm,
        )
        return [self._output(PoolingData(data=tensor(rows.copy())), ids) for rows, ids in outputs]

    def score(
        self,
        data_1: Any,
        data_2: Any,
        /,
        *,
        pooling_params: PoolingParams | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """A score for each pair (1-1, 1-N, N-N), as the float ``.outputs.score``; otherwise as :meth:`embed`.

        Args:
            data_1: A query or several: a str, or ``{"content": [{"type": "text", "text": ...}]}``.
            data_2: A document or several.
            pooling_params: The options of all pairs.
            tokenization_kwargs: See :class:`PromptOptions`.
            chat_template: A score template to use instead of the checkpoint's own: Jinja source, or a .jinja file.
            truncate_prompt_tokens: See :class:`PromptOptions`.
            use_tqdm: See :class:`PromptOptions`.

        Returns:
            One output for each pair; ``.outputs.score`` is a float.

        Raises:
            InvalidRequestError: The numbers do not pair up, or an option is invalid.
            UnsupportedTaskError: The checkpoint does not score.
        """
        pairs = pair_up(read_texts(data_1, "data_1"), read_texts(data_2, "data_2"))
        tokenization = Tokenization.of(tokenization_kwargs, truncate_prompt_tokens)
        if not tokenization.special_tokens:
            raise InvalidRequestError("add_special_tokens=False would leave a pair's two texts undivided; leave it out")
        (params,) = per_prompt(pooling_params, 1)
        params = self._model.complete("score", params, tokenization)
        pending = self._model.submit_score(pairs, params, template=chat_template)
        with draw_bar(show=use_tqdm, total=len(pairs), desc="Pooling") as bar:
            scores = pending.result().scores
            bar.update(len(pairs))
        return [
            self._output(ScoringData(score=float(score)), self._ids_of_pair(pair, params, chat_template))
            for score, pair in zip(scores, pairs, strict=True)
        ]

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer of the checkpoint.

        Returns:
            A copy that the engine itself does not use.
        """
        return self.engine.tokenizer

    def close(self, timeout: float | None = None, cancel: bool = False) -> None:
        """Close the engine, as :meth:`millpond.Engine.close`.

        Args:
            timeout: Most seconds to wait for what is queued; ``None`` waits for all of it.
            cancel: Drop what is queued at once.
        """
        self.engine.close(timeout, cancel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.engine.__exit__(*error)

    def _each(
        self,
        task: Task,
        prompts: Any,
        *,
        pooling_params: Params = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[tuple[FloatArray, Callable[[], list[int]]]]:
        """The rows of each prompt, and a function that gives its token ids."""
        tokenization = Tokenization.of(tokenization_kwargs, truncate_prompt_tokens)
        items = self._model.without_special_tokens(read_prompts(prompts), tokenization)
        completed = [self._model.complete(task, each, tokenization) for each in per_prompt(pooling_params, len(items))]
        groups: dict[PoolingParams, list[int]] = {}  # prompts with equal options are one call
        for i, each in enumerate(completed):
            groups.setdefault(each, []).append(i)
        calls: list[tuple[list[int], Pending[Any]]] = []
        rows_of: list[FloatArray | None] = [None] * len(items)
        try:
            for each, indices in groups.items():
                calls.append((indices, self._model.submit(task, [items[i] for i in indices], each)))
            with draw_bar(show=use_tqdm, total=len(items), desc="Pooling") as bar:
                for indices, pending in calls:
                    for i, rows in zip(indices, rows_of_output(pending.result()), strict=True):
                        rows_of[i] = rows
                    bar.update(len(indices))
        except BaseException:
            for _, pending in calls:
                pending.future.cancel()  # one prompt was refused, so the others are not needed
            raise
        return [
            (rows, self._ids_of(task, item, each))
            for rows, item, each in zip(cast("list[FloatArray]", rows_of), items, completed, strict=True)
        ]

    def _ids_of(self, task: Task, item: Item, params: PoolingParams) -> Callable[[], list[int]]:
        return lambda: self.engine.token_ids(self._model.engine_task(task, params), item, params)

    def _ids_of_pair(self, pair: Pair, params: PoolingParams, template: str | None) -> Callable[[], list[int]]:
        """A function that gives the ids of a pair; two texts read separately are joined by a padding token."""
        if self.engine.spec.score_type == "cross-encoder":
            return lambda: self.engine.token_ids("score", pair, params, template=template)
        task: Task = "embed" if self.engine.spec.score_type == "bi-encoder" else "token_embed"
        tokenizer = self.engine.text_tokenizer
        if self.engine.spec.score_type == "listwise":  # its text is that of all documents
            return lambda: [token for row in tokenizer.ids(pair, special_tokens=False) for token in row]
        padding = tokenizer.token_id(tokenizer.specials.get("pad_token", ""))

        def ids() -> list[int]:
            query = self.engine.token_ids(task, pair.query, vector_params(params, "query"))
            document = self.engine.token_ids(task, pair.document, vector_params(params, "document"))
            return [*query, *([] if padding is None else [padding]), *document]

        return ids

    def _output(self, data: Any, tokenize: Callable[[], list[int]]) -> RequestOutput:
        return RequestOutput(request_id=str(next(self._numbers)), outputs=data, tokenize=tokenize)


def _from_numpy(method: str) -> Callable[[FloatArray], torch.Tensor]:
    """torch's function that makes a tensor of an array: what a method returns are tensors, as in vLLM."""
    try:
        from torch import from_numpy
    except ModuleNotFoundError:
        raise MissingExtraError(
            f'LLM.{method}() returns tensors, as in vLLM, and needs torch: pip install "millpond[torch]"; LLM.embed(), '
            "classify() and score() return lists, and millpond.Engine arrays of numpy"
        ) from None
    return from_numpy
