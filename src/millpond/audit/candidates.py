"""Setting and Models: how a text may have become a vector, and the vectors that it becomes so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from millpond.audit.rows import Row
from millpond.engine.loading import describe
from millpond.engine.schedule.truncation import TruncatedTexts
from millpond.errors import InputTooLongError, InvalidRequestError, MillpondError
from millpond.ingest.sinks.batch import FloatArray
from millpond.tasks import Role
from millpond.values.config import EngineConfig
from millpond.values.params import PoolingParams
from millpond.values.spec import ModelSpec

if TYPE_CHECKING:
    from millpond.engine.engine import Engine

_POOLINGS = ("mean", "cls", "lasttoken")
_LENGTHS = (32, 64, 128, 256, 384, 512, 1024, 2048, 4096, 8192)
_WITHOUT_LIMIT = 512  # tokens that pipelines without a sentence-transformers file read of many checkpoints
_SPARE_TOKENS = 8  # a prompt and a text, tokenized apart, may have others


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a text becomes a vector, up to its length and precision.

    Attributes:
        model: The name of the model, as it was given.
        pooling: The pooling modes, joined by ``+``.
        prompt: The text before each text.
        prompt_name: What the prompt is for.
        role: The role of the texts, on which an adapter may depend; ``None`` for none.
        max_length: Most tokens of a text.
        text: Which of a row's texts is embedded, as :meth:`~millpond.audit.rows.Row.variants` names them.
    """

    model: str
    pooling: str
    prompt: str
    prompt_name: str
    role: str | None
    max_length: int
    text: str = "as stored"

    def differences(self, other: Setting) -> dict[str, tuple[str, str]]:
        """The names of what differs, with the values of both."""
        found = {}
        for name in ("model", "pooling", "prompt", "max_length", "text"):
            own, theirs = getattr(self, name), getattr(other, name)
            if own != theirs:
                found[name] = (str(own), str(theirs))
        if not found and self.role != other.role:
            found["prompt"] = (self.prompt_name, other.prompt_name)
        return found

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "model": self.model,
            "pooling": self.pooling,
            "prompt": self.prompt,
            "prompt_name": self.prompt_name,
            "max_length": self.max_length,
            "text": self.text,
        }


class Models:
    """The models that may have made the vectors, one engine in memory at a time for each pooling that is used.

    Args:
        names: Hub ids and folders, the likeliest first.
        settings: Arguments of their engines.
        prompts: Prompts beside their own.
        width: The width of the stored vectors, for error messages.

    Raises:
        ModelLoadError: A model cannot be found or read.
        InvalidRequestError: A model makes no vectors of texts.
    """

    def __init__(
        self, names: Sequence[str], *, settings: Mapping[str, Any] | None = None, prompts: Sequence[str] = ()
    ) -> None:
        self.names = list(dict.fromkeys(names))
        # In float32 whatever this processor prefers: rounding is to be told from another text.
        self._settings = {"dtype": "float32", **(settings or {})}
        self._prompts = list(prompts)
        self.specs: dict[str, ModelSpec] = {}
        self._limits: dict[str, int] = {}
        for name in self.names:
            spec = describe(EngineConfig(model=name, **self._settings))
            if "embed" not in spec.tasks:
                raise InvalidRequestError(f"model={name!r} makes no vectors of texts; name embedders")
            self.specs[name], self._limits[name] = spec, self._longest(name, spec)
        self._engines: dict[tuple[str, str], Engine | None] = {}
        self._known: dict[tuple[Any, ...], FloatArray] = {}
        self.embedded = 0  # texts

    def own(self, name: str) -> Setting:
        """How a model embeds documents by itself."""
        spec = self.specs[name]
        return Setting(
            model=name,
            pooling="+".join(spec.pooling),
            prompt=spec.role_prompt("document") or "",
            prompt_name="document prompt" if spec.role_prompt("document") else "no prompt",
            role="document",
            max_length=spec.max_length,
        )

    def poolings(self, name: str) -> list[str]:
        """The poolings of a model, its own first."""
        own = "+".join(self.specs[name].pooling)
        return [own, *(pooling for pooling in _POOLINGS if own and pooling != own)]

    def prompts(self, name: str) -> Iterator[dict[str, Any]]:
        """The prompts of a model, each once: documents' own, none, queries', the others and those that were given."""
        spec, own = self.specs[name], self.own(name)
        seen = set()
        query = spec.role_prompt("query")
        named = [(spec.prompts[key], f"prompt {key!r}", None) for key in spec.prompts]
        for prompt, words, role in (
            (own.prompt, own.prompt_name, "document"),
            ("", "no prompt", None),
            (query or "", "query prompt" if query else "no prompt of queries", "query"),
            *named,
            *((prompt, "--prompt", None) for prompt in self._prompts),
        ):
            adapted = role if spec.adapters else None
            if (prompt, adapted) not in seen and (role != "query" or query is not None or spec.adapters):
                seen.add((prompt, adapted))
                yield {"prompt": prompt, "prompt_name": words, "role": role}

    def lengths(self, name: str) -> list[int]:
        """The numbers of tokens at which a model's texts may be cut, its own first."""
        own, most = self.specs[name].max_length, self._limits[name]
        return list(dict.fromkeys((own, most, *(length for length in _LENGTHS if length < most))))

    def settings(self, name: str, *, poolings: Sequence[str] | None = None) -> Iterator[Setting]:
        """Settings of a model that differ in pooling and prompt, the likeliest first."""
        own = self.own(name)
        for pooling in self.poolings(name) if poolings is None else poolings:
            for prompt in self.prompts(name):
                yield replace(own, pooling=pooling, **prompt)

    def vectors(self, setting: Setting, rows: Sequence[Row]) -> FloatArray | None:
        """``[n, dimensions]``: what the texts of rows become, not normalized.

        ``None`` if the model has no such pooling, or its prompt is longer than the texts may be. A row without this
        variant of its text has NaN.
        """
        texts = [row.variants().get(setting.text) for row in rows]
        return self.vectors_of(setting, texts)

    def vectors_of(self, setting: Setting, texts: Sequence[str | None]) -> FloatArray | None:
        """As :meth:`vectors`, of texts."""
        engine = self._engine(setting.model, setting.pooling)
        if engine is None:
            return None
        adapted = setting.role if self.specs[setting.model].adapters else None
        asked = (setting.model, setting.pooling, setting.prompt, adapted)
        unique = list(dict.fromkeys(text for text in texts if text is not None))
        most, room = self._limits[setting.model], setting.max_length - _SPARE_TOKENS
        whole = dict.fromkeys(unique, most)  # at how many tokens each is cut; a text that is not cut has one vector
        if setting.max_length < most and unique:
            counts = engine.count_tokens([setting.prompt + text for text in unique])
            whole |= {text: setting.max_length for text, count in zip(unique, counts, strict=True) if count > room}
        try:
            for limit in {*whole.values()}:
                self._embed(engine, setting, (*asked, limit), [text for text in unique if whole[text] == limit])
        except InputTooLongError:  # the prompt alone takes as many tokens
            return None
        result = np.full((len(texts), engine.spec.dimensions), np.nan, dtype=np.float32)
        for index, text in enumerate(texts):
            if text is not None:
                result[index] = self._known[(*asked, whole[text], text)]
        return result

    def forget(self) -> None:
        """Forget vectors that were computed."""
        self._known.clear()

    def close(self) -> None:
        """Close the engines."""
        for engine in self._engines.values():
            if engine is not None:
                engine.close()
        self._engines.clear()

    def _embed(self, engine: Engine, setting: Setting, key: tuple[Any, ...], texts: Sequence[str]) -> None:
        new = [text for text in texts if (*key, text) not in self._known]
        if not new:
            return
        params = PoolingParams(
            prompt=setting.prompt,
            role=cast("Role | None", setting.role) if self.specs[setting.model].adapters else None,
            normalize=False,
            dimensions=engine.spec.dimensions,
            truncate_prompt_tokens=key[-1],
        )
        with TruncatedTexts.quiet():
            output = engine.submit("embed", new, params).result()
        self.embedded += len(new)
        self._known.update(((*key, text), row) for text, row in zip(new, output.embeddings, strict=True))

    def _engine(self, name: str, pooling: str) -> Engine | None:
        if (name, pooling) not in self._engines:
            from millpond.engine.engine import Engine

            own = pooling == "+".join(self.specs[name].pooling)
            settings = {**self._settings, "max_length": self._limits[name], **({} if own else {"pooling": pooling})}
            if own:
                self._engines[name, pooling] = Engine(name, **settings)
            else:
                self._engines[name, pooling] = None
                with suppress(MillpondError):  # a model may have no such pooling
                    self._engines[name, pooling] = Engine(name, **settings)
        return self._engines[name, pooling]

    def _longest(self, name: str, spec: ModelSpec) -> int:
        """How many tokens the model can read, at least as many as its files say."""
        if spec.max_length >= _WITHOUT_LIMIT or "max_length" in self._settings:
            return spec.max_length
        with suppress(MillpondError):
            return describe(EngineConfig(model=name, **{**self._settings, "max_length": _WITHOUT_LIMIT})).max_length
        return spec.max_length
