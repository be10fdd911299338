"""The pydantic fields and the engine calls that the adapters of LangChain and LlamaIndex share.

Only the adapters import this module: it needs pydantic, which the core does not. An adapter derives from a class below
and from a base class of its framework.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from millpond.compat.notices import log_prompt_notice, log_rerank_method
from millpond.compat.prompts import PromptOptions, ReplacedClass, role_prompt
from millpond.compat.replaced_options import Kind, hide_secrets, translate_options
from millpond.engine.shared import get_engine, get_engine_async
from millpond.errors import InvalidRequestError
from millpond.tasks import Role

if TYPE_CHECKING:
    from millpond import Engine, RerankOutput
else:
    # Importing the class would import torch; `_check_engine` checks the value instead.
    Engine = Any


def _check_engine(value: object) -> object:
    if value is None:
        return None
    from millpond import AsyncEngine, Engine

    if isinstance(value, AsyncEngine):
        return value.engine  # the adapter's asynchronous methods await it themselves
    if not isinstance(value, Engine):
        raise TypeError(f"engine must be a millpond.Engine, not a {type(value).__name__}")
    return value


PathStr = Annotated[str, BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value)]
Truncation = Literal["auto", "end", "start", "error"]


class EngineSource(BaseModel):
    """The fields of every adapter but the model's name: a model to load, or a loaded engine.

    A model is loaded on first use, and all objects of one configuration share one engine, also after pickling. The
    options of the classes that an adapter replaces (``model_kwargs``, ``cache_folder``, ...) are translated into these
    fields, or refused.

    Attributes:
        engine: A loaded engine, or an ``AsyncEngine`` over it, instead of a model's name and every option that is read
            at loading. Never serialized.
        revision: Branch, tag or commit of a hub id.
        device: ``auto`` or ``None`` (cuda, then mps, then cpu), a torch device, or a list of devices of one kind, which
            is kept as their names joined by commas.
        dtype: ``auto``, ``float32``, ``float16`` or ``bfloat16``.
        max_length: Most tokens per text or pair; the checkpoint's limit by default.
        hf_overrides: Merged into config.json, for example ``{"is_matryoshka": True}``.
        quantization: ``int8`` or ``fp8`` weights, as in ``millpond.Engine``.
        max_batch_tokens: Most tokens per forward.
        compile: As in ``millpond.Engine``.
        trust_remote_code: A permission that is accepted and never needed: no code of a checkpoint is run.
    """

    kind: ClassVar[Kind] = "loading"  # the options of replaced classes that it reads
    replaced: ClassVar[ReplacedClass] = "HuggingFaceEmbeddings"  # the framework's own class for vectors
    named: ClassVar[str] = "model"  # the field that holds the hub id or folder
    loading: ClassVar[tuple[str, ...]] = (
        *("revision", "device", "dtype", "max_length", "hf_overrides"),
        *("quantization", "max_batch_tokens", "compile", "trust_remote_code"),
    )  # the fields that are read when a model is loaded

    engine: Annotated[Engine | None, BeforeValidator(_check_engine)] = Field(default=None, exclude=True, repr=False)
    revision: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    max_length: int | None = Field(default=None, gt=0, strict=True)
    hf_overrides: dict[str, Any] | None = None
    quantization: str | None = None
    max_batch_tokens: int | None = Field(default=None, gt=0, strict=True)
    compile: bool = False
    trust_remote_code: bool = False

    # pydantic calls the validator that is defined last first, and prints the input of one that fails.
    @model_validator(mode="before")
    @classmethod
    def _translate_options(cls, options: Any) -> Any:
        own = {"model", "model_name", *cls.model_fields}
        if not isinstance(options, dict):  # an adapter
            return options
        try:
            return translate_options(options, own=own, kind=cls.kind, replaced=cls.replaced)
        except InvalidRequestError as error:  # pydantic adds the whole input and a link to a ValueError
            raise PydanticCustomError("option", "{reason}", {"reason": str(error)}) from None

    @model_validator(mode="before")
    @classmethod
    def _hide_secrets(cls, options: Any) -> Any:
        return hide_secrets(options) if isinstance(options, dict) else options

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        self._check_source()
        return self

    def _check_source(self) -> None:
        if bool(getattr(self, self.named)) == (self.engine is not None):
            raise ValueError(f"pass either {self.named}= (a hub id or a folder) or engine= (a loaded millpond.Engine)")
        fields = type(self).model_fields
        unread = [name for name in self.loading if getattr(self, name) != fields[name].default]
        if self.engine is not None and unread:
            raise ValueError(f"{unread[0]}= is read when a model is loaded, and engine= is loaded; give it to Engine")

    def _engine(self) -> Engine:
        return self.engine if self.engine is not None else get_engine(**self._configuration())

    async def _aengine(self) -> Engine:
        return self.engine if self.engine is not None else await get_engine_async(**self._configuration())

    def _configuration(self) -> dict[str, Any]:
        return {"model": getattr(self, self.named)} | {name: getattr(self, name) for name in self.loading}

    def __getstate__(self) -> dict[Any, Any]:
        if self.engine is not None:
            raise TypeError(
                f"{type(self).__name__}(engine=...) cannot be pickled: an engine holds a loaded model; build it from "
                f"{self.named}= instead, and each process loads its own"
            )
        return super().__getstate__()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        memo[id(self.engine)] = self.engine  # deep copies share the engine
        return super().__deepcopy__(memo)


class PromptSource(EngineSource):
    """The prompts of an adapter with a method for queries and one for documents.

    Attributes:
        query_prompt: Prepended to every query instead of the checkpoint's query prompt; ``""`` for none; ``"auto"`` for
            the checkpoint's or, if its files have none, that of its model card, if known.
        document_prompt: The same for documents.
        query_prompt_name: The name of one of the checkpoint's prompts, for queries; ``""`` for its default prompt, if
            it declares one, which is what ``SentenceTransformer.encode`` applies by itself.
        document_prompt_name: The same for documents.
        truncate: Which end of an over-long text is cut, or ``"error"``.
    """

    query_prompt: str | None = None
    document_prompt: str | None = None
    query_prompt_name: str | None = None
    document_prompt_name: str | None = None
    truncate: Truncation = "auto"

    def _prompts(self) -> dict[Role, PromptOptions]:
        return {
            "query": PromptOptions(text=self.query_prompt, name=self.query_prompt_name),
            "document": PromptOptions(text=self.document_prompt, name=self.document_prompt_name),
        }

    def _prompt(self, engine: Engine, role: Role) -> str | None:
        """The text put before a text of a role; ``None`` leaves it to the engine."""
        options = self._prompts()[role]
        return None if options == PromptOptions() else role_prompt(engine.spec, role, options)


class EmbeddingSource(PromptSource):
    """The fields and calls of an adapter for vectors.

    Attributes:
        dimensions: Matryoshka width of the vectors.
        normalize: Whether to L2-normalize the vectors; by default as the checkpoint does.
        long_texts: ``"mean"`` reads an over-long text to its end, in windows whose vectors are averaged.
        pooling: Replaces the checkpoint's pooling method.
        cache: Path of a vector cache. To share a ``VectorCache`` object, give it to an engine and pass that.
    """

    kind = "embedding"
    loading = (*EngineSource.loading, "pooling", "cache")

    dimensions: int | None = Field(default=None, gt=0, strict=True)
    normalize: bool | None = None
    long_texts: Literal["mean"] | None = None
    pooling: str | None = None
    cache: PathStr | None = None

    def _embed(self, texts: list[str], role: Role, *, show_progress: bool = False) -> list[list[float]]:
        engine = self._engine()
        return engine.embed(texts, show_progress=show_progress, **self._options(engine, role)).tolist()

    async def _aembed(self, texts: list[str], role: Role) -> list[list[float]]:
        engine = await self._aengine()
        from millpond import AsyncEngine  # imports torch, which loading has imported already

        output = await AsyncEngine(engine).embed(texts, **self._options(engine, role))
        return await output.atolist()

    def _options(self, engine: Engine, role: Role) -> dict[str, Any]:
        """The options of ``embed``; the first time, a notice where vectors differ from the replaced class's."""
        log_prompt_notice(
            engine.spec, self._prompts(), normalize=self.normalize, pooling=self.pooling, replaced=self.replaced
        )
        options = {name: getattr(self, name) for name in ("dimensions", "normalize", "long_texts", "truncate")}
        return {"role": role, "prompt": self._prompt(engine, role)} | options


class ScorerSource(EngineSource):
    """The fields and calls of an adapter that scores pairs.

    Attributes:
        method: How a pair is scored: ``cosine`` of two vectors, ``maxsim`` of token vectors, or ``auto``, by what the
            checkpoint is.
        instruction: Text for the instruction slot of an LLM reranker's template; refused by a model without one.
        truncate: Which end of an over-long text is cut, or ``"error"``.
        activation: Replaces the checkpoint's activation of its logits: ``identity``, ``sigmoid`` or ``softmax``.
        convert: ``auto``, ``embed`` or ``classify``, as in ``millpond.Engine``.
        score_template: Jinja source, or a .jinja file, that renders a pair; the checkpoint's template by default.
    """

    kind = "scoring"
    loading = (*EngineSource.loading, "activation", "convert", "score_template")

    method: Literal["auto", "cosine", "maxsim"] = "auto"
    instruction: str | None = None
    truncate: Truncation = "auto"
    activation: Literal["identity", "sigmoid", "softmax"] | None = None
    convert: str = "auto"
    score_template: str | None = None

    def _options(self) -> dict[str, Any]:
        """The options of ``score``."""
        return {"method": self.method, "instruction": self.instruction, "truncate": self.truncate}


class RankerSource(ScorerSource):
    """The fields and calls of an adapter that sorts texts.

    Attributes:
        budget_ms: Answer within so many milliseconds: texts are scored in the order in which they come, the best first,
            until the best ones can no longer change or the time is over. The others follow without a score (``None``).
    """

    budget_ms: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    def _ranked(self, query: str, texts: Sequence[str], top_n: int | None) -> RerankOutput:
        engine = self._engine()
        log_rerank_method(engine.spec, self.method)
        return engine.rerank(query, texts, top_n=top_n, **self._ranking())

    async def _aranked(self, query: str, texts: Sequence[str], top_n: int | None) -> RerankOutput:
        engine = await self._aengine()
        log_rerank_method(engine.spec, self.method)
        from millpond import AsyncEngine  # imports torch, which loading has imported already

        return await AsyncEngine(engine).rerank(query, texts, top_n=top_n, **self._ranking())

    def _ranking(self) -> dict[str, Any]:
        """The options of ``rerank``."""
        return {"budget_ms": self.budget_ms, **self._options()}
