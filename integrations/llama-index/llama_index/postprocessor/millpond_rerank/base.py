"""MillpondRerank: LlamaIndex's node postprocessor over a millpond engine in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Self

import llama_index.core.instrumentation as instrument
from llama_index.core.callbacks import CBEventType, EventPayload
from llama_index.core.instrumentation.events.rerank import ReRankEndEvent, ReRankStartEvent
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
from pydantic import AliasChoices, ConfigDict, Field, model_validator

from llama_index.embeddings.millpond.replaced_options import replaced_rerank_options
from llama_index.embeddings.millpond.source import EngineSource, PathStr
from llama_index.embeddings.millpond.text_lists import listed
from millpond.compat.rerank_method import log_rerank_method

if TYPE_CHECKING:
    from millpond import RerankOutput

_RETRIEVAL_SCORE = "retrieval_score"

dispatcher = instrument.get_dispatcher(__name__)  # type: ignore[attr-defined]  # LlamaIndex re-exports it


class MillpondRerank(EngineSource, BaseNodePostprocessor):
    """Sorts nodes by relevance to a query, best first, by a model that runs in this process.

    Cross-encoders (LLM rerankers with their own template) and late-interaction checkpoints score as they were trained
    to; an embedding checkpoint scores by MaxSim over its token states, so the model that retrieved can rerank too. The
    scale of the scores depends on the checkpoint and on ``method``: docs/engine.md has a table. It reads the same
    content of a node as an embedding model: its text, and its metadata except the keys that the node excludes.

    The scores replace those of the retrieval, in copies: nodes passed in are not changed. With ``model=``, the model
    is loaded on first use, and all objects of one configuration share one engine, also after pickling. The async method
    neither blocks the event loop nor occupies a thread.

    Attributes:
        model: Hub id or local folder; also accepted, and readable, as ``model_name``. ``model`` and ``top_n`` may be
            positional, in this order or, with a number first, as ``SentenceTransformerRerank`` has them.
        engine: A loaded engine, instead of ``model`` and every option that is read at loading. Never serialized.
        top_n: How many of the best to keep; ``None`` keeps all.
        keep_retrieval_score: Store the score of the retrieval in ``node.metadata["retrieval_score"]``, in copies of the
            nodes; embedding models and language models do not see it.
        method: How a pair is scored: ``cosine`` of two vectors, ``maxsim`` of token vectors, or ``auto``, by what the
            checkpoint is.
        instruction: Text for the instruction slot of an LLM reranker's template; refused by a model without one.
        truncate: Which end of an over-long text is cut, or ``"error"``.
        activation: Replaces the checkpoint's activation of its logits: ``identity``, ``sigmoid`` or ``softmax``.
        convert: ``auto``, ``embed`` or ``classify``, as in ``millpond.Engine``.
        score_template: Jinja source, or a .jinja file, that renders a pair; the checkpoint's template by default.
        revision: Branch, tag or commit of a hub id.
        device: ``auto`` or ``None`` (cuda, then mps, then cpu), a torch device, or a list of them.
        dtype: ``auto``, ``float32``, ``float16`` or ``bfloat16``.
        max_length: Most tokens per pair, or per text if texts are encoded apart; the checkpoint's limit by default.
        hf_overrides: Merged into config.json.
        max_batch_tokens: Most tokens per forward.
        quantization: ``int8`` or ``fp8`` weights, as in ``millpond.Engine``.
        compile: Compile the model, as in ``millpond.Engine``.
        trust_remote_code: Accepted, and never needed.
    """

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    loading = (*EngineSource.loading, "activation", "convert", "score_template")

    model: PathStr | None = Field(default=None, validation_alias=AliasChoices("model", "model_name"), min_length=1)
    top_n: int | None = Field(default=3, gt=0, strict=True)
    keep_retrieval_score: bool = False
    method: Literal["auto", "cosine", "maxsim"] = "auto"
    instruction: str | None = None
    truncate: Literal["end", "start", "error"] = "end"
    activation: Literal["identity", "sigmoid", "softmax"] | None = None
    convert: str = "auto"
    score_template: str | None = None

    def __init__(self, *positional: str | os.PathLike[str] | int, **options: Any) -> None:
        """From the fields above, of which ``model`` and ``top_n`` may be positional."""
        # SentenceTransformerRerank, ColbertRerank and FlagEmbeddingReranker have top_n first.
        names = ("top_n", "model") if positional and isinstance(positional[0], int) else ("model", "top_n")
        super().__init__(**self._with_positional(positional, options, *names))

    @classmethod
    def _translated(cls, options: dict[str, Any], own: set[str]) -> dict[str, Any]:
        return replaced_rerank_options(options, own)

    @classmethod
    def class_name(cls) -> str:
        """The name of this class in serialized data."""
        return "MillpondRerank"

    @property
    def model_name(self) -> str | None:
        """``model``; with ``engine=``, that of the engine."""
        return self.engine.spec.name if self.engine is not None else self.model

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.model is None) == (self.engine is None):
            raise ValueError("pass either model= (a hub id or a folder) or engine= (a loaded millpond.Engine)")
        if self.engine is not None:
            self._check_loading()
        return self

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        nodes, query = listed(nodes, "postprocess_nodes", "node"), _query_of(query_bundle)
        with self._reported(nodes, query) as best:
            if nodes:
                texts = _texts_of(nodes)
                engine = self._engine()
                log_rerank_method(engine.spec, self.method)
                ranked = engine.rerank(query.query_str, texts, **self._options())
                best += self._scored(nodes, ranked)
        return best

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        nodes, query = listed(nodes, "apostprocess_nodes", "node"), _query_of(query_bundle)
        with self._reported(nodes, query) as best:
            if nodes:
                texts = _texts_of(nodes)
                engine = await self._aengine()
                log_rerank_method(engine.spec, self.method)
                from millpond import AsyncEngine  # imports torch, which loading has imported already

                ranked = await AsyncEngine(engine).rerank(query.query_str, texts, **self._options())
                best += self._scored(nodes, ranked)
        return best

    def _options(self) -> dict[str, Any]:
        """The options of ``rerank``."""
        return {
            "top_n": self.top_n,
            "method": self.method,
            "instruction": self.instruction,
            "truncate": self.truncate,
        }

    @contextmanager
    def _reported(self, nodes: list[NodeWithScore], query: QueryBundle) -> Iterator[list[NodeWithScore]]:
        """Emit LlamaIndex's events around the work, which fills the yielded list."""
        best: list[NodeWithScore] = []
        name = self.engine.spec.name if self.engine is not None else str(self.model)
        top_n = len(nodes) if self.top_n is None else self.top_n
        dispatcher.event(ReRankStartEvent(query=query, nodes=nodes, top_n=top_n, model_name=name))
        payload: dict[str, Any] = {
            EventPayload.NODES: nodes,
            EventPayload.MODEL_NAME: name,
            EventPayload.QUERY_STR: query.query_str,
            EventPayload.TOP_K: top_n,
        }
        with self.callback_manager.event(CBEventType.RERANKING, payload=payload) as event:
            yield best
            event.on_end(payload={EventPayload.NODES: best})
        dispatcher.event(ReRankEndEvent(nodes=best))

    def _scored(self, nodes: list[NodeWithScore], ranked: RerankOutput) -> list[NodeWithScore]:
        chosen = []
        for result in ranked:
            hit = nodes[result.index]
            node = hit.node
            if self.keep_retrieval_score:
                node = node.model_copy(
                    update={
                        "metadata": {**node.metadata, _RETRIEVAL_SCORE: hit.score},
                        "excluded_embed_metadata_keys": [*node.excluded_embed_metadata_keys, _RETRIEVAL_SCORE],
                        "excluded_llm_metadata_keys": [*node.excluded_llm_metadata_keys, _RETRIEVAL_SCORE],
                    }
                )
            chosen.append(hit.model_copy(update={"node": node, "score": result.relevance_score}))
        return chosen


def _query_of(query_bundle: QueryBundle | None) -> QueryBundle:
    if query_bundle is None:
        raise ValueError("MillpondRerank needs the query: postprocess_nodes(nodes, query_str=...)")
    return query_bundle


def _texts_of(nodes: list[NodeWithScore]) -> list[str]:
    return [hit.node.get_content(metadata_mode=MetadataMode.EMBED) for hit in nodes]
