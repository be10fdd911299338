"""The methods of the tasks, which turn the caller's options into PoolingParams."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from time import perf_counter
from typing import Any, Literal, TypedDict

from millpond.engine.composite.scoring import pair_up
from millpond.engine.composite.timed_ranking import TimeBudget
from millpond.engine.input import validate
from millpond.tasks import Activation, Aggregation, OutputDtype, Role, ScoreMethod, Task, Truncate
from millpond.values.inputs import Pair, rerank_pairs
from millpond.values.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    RerankOutput,
    RewardOutput,
    ScoreOutput,
    SparseEmbeddingOutput,
    TokenClassificationOutput,
    TokenEmbeddingOutput,
)
from millpond.values.params import PoolingParams
from millpond.values.replacements import names_replacements


class EmbedOptions(TypedDict, total=False):
    """The options of ``embed``, for ``embed_iter``."""

    role: Role | None
    prompt: str | None
    prompt_name: str | None
    dimensions: int | None
    normalize: bool | None
    output_dtype: OutputDtype
    adapter: str | None
    long_texts: Literal["mean"] | None
    truncate: Truncate
    show_progress: bool


@lru_cache(64, typed=True)
def _kept_params(**options: Any) -> PoolingParams:
    return PoolingParams(**options)


def _params(**options: Any) -> PoolingParams:
    """The checked options of a call; those of the last calls are kept, since checking them again costs a short text."""
    try:
        return _kept_params(**options)
    except TypeError:  # one that has no hash, which is refused here
        return PoolingParams(**options)


@names_replacements
class TaskMethods(ABC):
    """One method for each task; :class:`~millpond.Engine` has them, :class:`~millpond.AsyncEngine` awaits them."""

    @abstractmethod
    def _run(
        self,
        task: Task,
        inputs: Sequence[Any],
        params: PoolingParams,
        show_progress: bool,
        *,
        method: ScoreMethod = "auto",
        ranking: bool = False,
        finish: Callable[[Any], Any] | None = None,
    ) -> Any:
        """The output of a call, after ``finish``; ``ranking``: ``method="auto"`` as in :meth:`rerank`."""

    @abstractmethod
    def _rank_timed(
        self,
        pairs: Sequence[Pair],
        params: PoolingParams,
        method: ScoreMethod,
        budget: TimeBudget,
        show_progress: bool,
    ) -> Any:
        """The output of :meth:`rerank` within a budget."""

    def embed(
        self,
        texts: Sequence[str],
        *,
        role: Role | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        output_dtype: OutputDtype = "float32",
        adapter: str | None = None,
        long_texts: Literal["mean"] | None = None,
        truncate: Truncate = "auto",
        show_progress: bool = False,
    ) -> EmbeddingOutput:
        """One vector per text.

        Args:
            texts: A list of texts; duplicates are computed once.
            role: ``"query"`` or ``"document"`` applies the checkpoint's prompt for that role, if it has one.
            prompt: A prompt to put before every text instead; ``""`` switches the default prompt off.
            prompt_name: The name of one of ``spec.prompts``, to use instead.
            dimensions: Matryoshka width; the vector is cut, then normalized.
            normalize: L2-normalize; by default as the checkpoint does.
            output_dtype: ``float32``, ``float16``, ``int8``, ``uint8``, ``binary`` or ``ubinary``.
            adapter: One of ``spec.adapters``; by default the adapter for the role.
            long_texts: ``"mean"`` reads an over-long text to its end, in windows of ``max_length``, each with special
                tokens and prompt; the windows' vectors are averaged, weighted by their tokens. Nothing is truncated.
            truncate: ``"end"`` or ``"start"`` cuts that end of an over-long text, ``"auto"`` the end that the
                checkpoint's ``truncation_side`` names; ``"error"`` refuses the text.
            show_progress: Draw a progress bar, if the output is a terminal or a notebook.

        Returns:
            ``embeddings [n, d]`` in the order of the texts, with ``cached``, ``truncated`` and ``usage``.
        """
        params = _params(
            role=role,
            prompt=prompt,
            prompt_name=prompt_name,
            dimensions=dimensions,
            normalize=normalize,
            output_dtype=output_dtype,
            adapter=adapter,
            long_texts=long_texts,
            truncate=truncate,
        )
        output: EmbeddingOutput = self._run("embed", texts, params, show_progress)
        return output

    def token_embed(
        self,
        texts: Sequence[str],
        *,
        role: Role | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        adapter: str | None = None,
        spans: Sequence[Sequence[tuple[int, int]]] | None = None,
        long_texts: Literal["windows"] | None = None,
        truncate: Truncate = "auto",
        show_progress: bool = False,
    ) -> TokenEmbeddingOutput:
        """One matrix per text: a row for each token, special tokens and prompt included.

        A late-interaction checkpoint encodes a query or a document as it was trained to (marker, expansion, skiplist);
        without a role, as a document.

        Args:
            texts: A list of texts.
            role: ``"query"`` or ``"document"`` applies the checkpoint's prompt for that role, if it has one.
            prompt: A prompt to put before every text instead; ``""`` switches the default prompt off.
            prompt_name: The name of one of ``spec.prompts``, to use instead.
            dimensions: Matryoshka width; each row is cut, then normalized.
            normalize: L2-normalize each row; by default if the checkpoint normalizes its vectors.
            adapter: One of ``spec.adapters``; by default the adapter for the role.
            spans: Late chunking: for each text its chunks, as half-open character spans. The matrix then has a row for
                each span, the mean of its tokens in the context of the whole text (Günther et al., 2024).
            long_texts: With ``spans``, ``"windows"`` reads an over-long text to its end, in windows that overlap; a
                span is pooled from the one in which it has most context, and must be shorter than a window. Nothing is
                truncated, and a span without tokens gets a row of zeros.
            truncate: ``"end"`` or ``"start"`` cuts that end of an over-long text, ``"auto"`` the end that the
                checkpoint's ``truncation_side`` names; ``"error"`` refuses the text.
            show_progress: Draw a progress bar, if the output is a terminal or a notebook.

        Returns:
            ``embeddings``, a :class:`~millpond.vectors.ragged.Ragged` of n ``[tokens_i, d]`` matrices.
        """
        params = _params(
            role=role,
            prompt=prompt,
            prompt_name=prompt_name,
            dimensions=dimensions,
            normalize=normalize,
            adapter=adapter,
            long_texts=long_texts,
            truncate=truncate,
        )
        items = texts if spans is None else validate.with_spans(texts, spans)

        output: TokenEmbeddingOutput = self._run("token_embed", items, params, show_progress)
        return output

    def sparse_embed(
        self,
        texts: Sequence[str],
        *,
        role: Role | None = None,
        truncate: Truncate = "auto",
        show_progress: bool = False,
    ) -> SparseEmbeddingOutput:
        """Weights of vocabulary entries for each text: SPLADE checkpoints and BGE-M3.

        Args:
            texts: A list of texts.
            role: ``"query"`` or ``"document"``, for a checkpoint that reads them differently.
            truncate: ``"end"`` or ``"start"`` cuts that end of an over-long text, ``"auto"`` the end that the
                checkpoint's ``truncation_side`` names; ``"error"`` refuses the text.
            show_progress: Draw a progress bar, if the output is a terminal or a notebook.

        Returns:
            A sequence of n ``{token id: weight}``, without entries of weight 0.
        """
        params = PoolingParams(role=role, truncate=truncate)
        output: SparseEmbeddingOutput = self._run("sparse_embed", texts, params, show_progress)
        return output

    def classify(
        self,
        texts: Sequence[str],
        *,
        labels: Sequence[str] | None = None,
        template: str | None = None,
        multi_label: bool = False,
        activation: bool | Activation | None = None,
        truncate: Truncate = "auto",
        show_progress: bool = False,
    ) -> ClassificationOutput:
        """Probabilities of the checkpoint's classes for each text, or of labels that the caller names.

        Args:
            texts: A list of texts.
            labels: Labels of your own, for a model of natural language inference: how far each text entails the
                hypothesis that it has the label, as transformers' zero-shot-classification pipeline computes it.
            template: The hypothesis, in which a label takes the place of ``{}``; by default ``This example is {}.``
            multi_label: Of ``labels``: several may be true. Each then has a probability of its own; otherwise those of
                a text add up to 1.
            activation: ``False`` gives raw logits; or ``"identity"``, ``"sigmoid"``, ``"softmax"``. By default the
                checkpoint's own (``problem_type``, sentence-transformers' key), else softmax over several classes and
                sigmoid for one.
            truncate: ``"end"`` or ``"start"`` cuts that end of an over-long text, ``"auto"`` the end that the
                checkpoint's ``truncation_side`` names; ``"error"`` refuses the text.
            show_progress: Draw a progress bar, if the output is a terminal or a notebook.

        Returns:
            ``probs [n, labels]`` with ``labels`` and ``top(k)``.
        """
        params = PoolingParams(
            labels=labels,  # type: ignore[arg-type]  # PoolingParams makes it a tuple
            template=template,
            multi_label=multi_label,
            activation=activation,
            truncate=truncate,
        )
        output: ClassificationOutput = self._run("classify", texts, params, show_progress)
        return output

    def token_classify(
        self,
        texts: Sequence[str],
        *,
        labels: Sequence[str] | None = None,
        threshold: float | None = None,
        nested: bool = False,
        multi_label: bool = False,
        aggregation: Aggregation = "none",
        activation: bool | Activation | None = None,
        truncate: Truncate = "auto",
        show_progress: bool = False,
    ) -> TokenClassificationOutput:
        """Entities of each text, with their character spans.

        Args:
            texts: A list of texts.
            labels: What to look for, in words of your own, for a GLiNER: ``["person", "name of a ship"]``.
            threshold: Of ``labels``: the probability that an entity must exceed; by default 0.5.
            nested: Of ``labels``: an entity may be inside another.
            multi_label: Of ``labels``: a span may have several.
            aggregation: ``"none"`` gives every token; ``"simple"``, ``"first"``, ``"average"`` and ``"max"`` join
                tokens into entities as transformers' pipeline does.
            activation: ``False`` gives raw logits; or ``"identity"``, ``"sigmoid"``, ``"softmax"``; by default the
                checkpoint's own.
            truncate: ``"end"`` or ``"start"`` cuts that end of an over-long text, ``"auto"`` the end that the
                checkpoint's ``truncation_side`` names; ``"error"`` refuses the text.
            show_progress: Draw a progress bar, if the output is a terminal or a notebook.

        Returns:
            A sequence of n lists of :class:`~millpond.Entity`, with ``probs``, a
            :class:`~millpond.vectors.ragged.Ragged` of ``[tokens_i, labels]``; with ``labels`` of
            ``[entities_i, labels]``.
        """
        params = PoolingParams(
            labels=labels,  # type: ignore[arg-type]  # PoolingParams makes it a tuple
            threshold=threshold,
            nested=nested,
            multi_label=multi_label,
            aggregation=aggregation,
            activation=activation,
            truncate=truncate,
        )
        output: TokenClassificationOutput = self._run("token_classify", texts, params, show_progress)
        return output

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        method: ScoreMethod = "auto",
        activation: bool | Activation | None = None,
        instruction: str | None = None,
        truncate: Truncate = "auto",
        show_progress: bool = False,
    ) -> ScoreOutput:
        """How well documents answer queries: 1-1, 1-N or N-N.

        Args:
            queries: One query, or one for each document.
            documents: One document, or several.
            method: ``"auto"`` is what the checkpoint is (``spec.score_type``): a cross-encoder reads both texts
                together (an LLM reranker in its own template), a listwise reranker all documents of a query (neighbours
                with the same query), a late-interaction checkpoint gives MaxSim, an embedder its own similarity
                (``spec.similarity``: the cosine, if its files name none). ``"cosine"`` compares the vectors of the two
                texts. ``"maxsim"`` compares their token vectors: the sum over the query's tokens of the best similarity
                to a document token. An encoder that is no late-interaction checkpoint gives its token states,
                L2-normalized, special tokens and the prompt of each role included.
            activation: Of a cross-encoder only: ``False`` gives raw logits; or ``"identity"``, ``"sigmoid"``,
                ``"softmax"``; by default the checkpoint's own.
            instruction: Fills an LLM reranker's template slot, nothing else.
            truncate: ``"end"`` or ``"start"`` cuts that end of over-long texts, never special tokens or a template's
                suffix; ``"error"`` refuses them.
            show_progress: Draw a progress bar, if the output is a terminal or a notebook.

        Returns:
            ``scores [n]``, and in ``method`` what they are.
        """
        params = _params(activation=activation, instruction=instruction, truncate=truncate)
        pairs = pair_up(queries, documents)
        output: ScoreOutput = self._run("score", pairs, params, show_progress, method=method)
        return output

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        budget_ms: float | None = None,
        first_scores: Sequence[float] | None = None,
        method: ScoreMethod = "auto",
        activation: bool | Activation | None = None,
        instruction: str | None = None,
        truncate: Truncate = "auto",
        show_progress: bool = False,
    ) -> RerankOutput:
        """Documents sorted by how well they answer a query, best first.

        Args:
            query: The query.
            documents: A list of documents; duplicates are computed once. An empty one gets a score like any other.
            top_n: Keep the best only; ``None`` keeps all.
            budget_ms: Answer within so many milliseconds from now, the wait for other callers included. Documents are
                scored in the order of ``first_scores``, until the ``top_n`` best can no longer change (with a
                probability of 0.99) or the time is over; the others follow in the order of ``first_scores``, without a
                score. A listwise reranker refuses it.
            first_scores: Of ``budget_ms``: the score of each document in the search that found them, higher is better.
                By default the list is in that order, the best document first.
            method: ``"auto"`` is what the checkpoint is (``spec.rerank_type``): a cross-encoder's score, and MaxSim for
                a late-interaction checkpoint and for an embedder, whose token states are compared. Here alone it
                differs from :meth:`score`: the cosine of an embedder's vectors would sort documents as the search that
                found them did. ``"cosine"`` compares the vectors, ``"maxsim"`` the token vectors of the two texts.
            activation: Of a cross-encoder only: ``False`` gives raw logits; or ``"identity"``, ``"sigmoid"``,
                ``"softmax"``; by default the checkpoint's own.
            instruction: Fills an LLM reranker's template slot, nothing else.
            truncate: ``"end"`` or ``"start"`` cuts that end of over-long texts, never special tokens or a template's
                suffix; ``"error"`` refuses them.
            show_progress: Draw a progress bar, if the output is a terminal or a notebook.

        Returns:
            A sequence of :class:`~millpond.RerankResult`; of equal scores the earlier document comes first. Its
            ``method`` says what the scores are; with ``budget_ms`` its ``scored`` and ``stopped`` say which documents
            have one, and why no more.
        """
        begun = perf_counter()
        pairs = rerank_pairs(query, documents, top_n)
        params = _params(activation=activation, instruction=instruction, truncate=truncate)
        budget = TimeBudget.of(budget_ms, documents=len(pairs), top_n=top_n, first_scores=first_scores, begun=begun)
        if budget is not None:
            timed: RerankOutput = self._rank_timed(pairs, params, method, budget, show_progress)
            return timed

        def finish(scored: ScoreOutput) -> RerankOutput:
            texts = [pair.document for pair in pairs]
            return RerankOutput.ranked(
                scored.scores,
                texts,
                top_n=top_n,
                method=scored.method,
                truncated=scored.truncated,
                usage=scored.usage,
            )

        output: RerankOutput = self._run(
            "score", pairs, params, show_progress, method=method, ranking=True, finish=finish
        )
        return output

    def reward(
        self,
        texts_or_conversations: Sequence[str | Sequence[Mapping[str, str]]],
        *,
        step_tag_id: int | None = None,
        returned_token_ids: Sequence[int] | None = None,
        activation: bool | Activation | None = None,
        truncate: Truncate = "auto",
        show_progress: bool = False,
    ) -> RewardOutput:
        """Rewards, raw by default: one row for a text, or one for each of its steps.

        Args:
            texts_or_conversations: Texts, or lists of ``{"role": ..., "content": ...}`` messages, which are rendered by
                the checkpoint's chat template.
            step_tag_id: Return only the rows of this token; by default the checkpoint's own (``<extra_0>`` in Qwen's
                process reward models).
            returned_token_ids: Of a language model: return the logits of these vocabulary entries as the columns
                (math-shepherd: good and bad).
            activation: ``True`` turns logits into probabilities (softmax over several columns, sigmoid for one).
            truncate: ``"end"`` or ``"start"`` cuts that end of an over-long text, ``"auto"`` the end that the
                checkpoint's ``truncation_side`` names; ``"error"`` refuses the text.
            show_progress: Draw a progress bar, if the output is a terminal or a notebook.

        Returns:
            ``rewards``, a :class:`~millpond.vectors.ragged.Ragged` of n ``[rows_i, columns]``.
        """
        params = PoolingParams(
            step_tag_id=step_tag_id,
            returned_token_ids=returned_token_ids,  # type: ignore[arg-type]  # PoolingParams makes it a tuple
            activation=activation,
            truncate=truncate,
        )
        output: RewardOutput = self._run("reward", texts_or_conversations, params, show_progress)
        return output

    def encode(
        self, texts: Sequence[Any], *, task: Task, params: PoolingParams | None = None, show_progress: bool = False
    ) -> Any:
        """Any task by its name.

        Args:
            texts: Texts; (query, document) pairs for ``score``.
            task: The task.
            params: The options of the call.
            show_progress: Draw a progress bar, if the output is a terminal or a notebook.

        Returns:
            The output of the task's own method.
        """
        return self._run(task, texts, params or PoolingParams(), show_progress)
