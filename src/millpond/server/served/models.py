"""ServedModels: the models of one server, by name and by task."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from millpond.checkpoints.templates.score_template import ScoreTemplate
from millpond.engine.engine import Engine
from millpond.engine.loading import describe
from millpond.errors import EngineClosedError, InvalidRequestError, UnknownModelError
from millpond.server.errors import NotServedError
from millpond.server.settings.config import ModelConfig
from millpond.tasks import Task
from millpond.values.config import EngineConfig
from millpond.vllm import arguments
from millpond.vllm.model import PoolingModel
from millpond.vllm.pooler_config import PoolerConfig


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A loaded checkpoint under the names that clients use."""

    names: tuple[str, ...]  # names that requests may use; responses use the first
    root: str  # hub id or folder of the checkpoint
    pooling: PoolingModel  # the engine with vLLM's interface
    chat_template: str | None = None  # Jinja source that replaces the tokenizer's own
    created: int = field(default_factory=lambda: int(time.time()))  # Unix time of the load

    @property
    def name(self) -> str:
        """The name in responses."""
        return self.names[0]

    @property
    def engine(self) -> Engine:
        """The engine."""
        return self.pooling.engine

    @property
    def max_model_len(self) -> int:
        """Most tokens per prompt."""
        return self.engine.spec.max_length


class ServedModels:
    """Every model of a server.

    Args:
        models: At least one; no two with the same name.

    Raises:
        InvalidRequestError: No model, or two with the same name.
    """

    def __init__(self, models: Sequence[ServedModel]) -> None:
        if not models:
            raise InvalidRequestError("a server needs a model; name at least one")
        self._models = tuple(models)
        self._by_name: dict[str, ServedModel] = {}
        for model in models:
            for name in model.names:
                if name in self._by_name:
                    raise InvalidRequestError(f"two models are called {name!r}; give each a served_model_name")
                self._by_name[name] = model

    @classmethod
    def load(cls, configs: Sequence[ModelConfig]) -> Self:
        """Load every checkpoint; if one fails, those already loaded are closed.

        Args:
            configs: A configuration of each model.

        Returns:
            The models, in order.

        Raises:
            ModelLoadError: A checkpoint cannot be found, read or run.
            InvalidRequestError: An invalid option.
        """
        for config in configs:
            # A mistake in the last configuration is reported before the first checkpoint is loaded.
            EngineConfig(model=config.model, **_options(config))
            _chat_template(config)
        loaded: list[ServedModel] = []
        try:
            for config in configs:
                loaded.append(_load(config))
            return cls(loaded)
        except BaseException:
            for model in loaded:
                model.engine.close()
            raise

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def find(self, name: str | None, *, tasks: Collection[Task], api: str) -> ServedModel:
        """The model for a request.

        Args:
            name: The name in the request; without one, the only model that serves one of the tasks.
            tasks: The model must serve at least one of them; empty: any model.
            api: Name of the route in error messages: ``Embeddings API``.

        Returns:
            The named model, or the only one that serves one of the tasks.

        Raises:
            UnknownModelError: No model has that name (404).
            NotServedError: The named model, or every model, serves none of the tasks (501).
            InvalidRequestError: No name, and several models serve the tasks (400).
        """
        if name and name not in self._by_name:
            raise UnknownModelError(f"The model `{name}` does not exist.")
        candidates = (self._by_name[name],) if name else self._models
        return only([each for each in candidates if not tasks or each.engine.tasks & frozenset(tasks)], api)

    def check_health(self) -> None:
        """Raise if only a new process helps; until then the other devices serve.

        Raises:
            EngineClosedError: An engine accepts no requests any more.
            DeviceLostError: An engine has lost a device.
        """
        for model in self._models:
            if model.engine.closed:
                raise EngineClosedError(f"the engine of {model.name!r} was closed")
            for error in model.engine.lost_devices:
                raise error

    def close(self) -> None:
        """Finish the queued work, then stop every engine."""
        for model in self._models:
            model.engine.close()


def only(able: Sequence[ServedModel], api: str) -> ServedModel:
    """The model that is able to serve a request; of several, the request has to name one."""
    if not able:
        raise NotServedError(f"The model does not support {api}")
    if len(able) > 1:
        names = ", ".join(model.name for model in able)
        raise InvalidRequestError(f"several models serve the {api}; name one as model: {names}")
    return able[0]


def _load(config: ModelConfig) -> ServedModel:
    options = _options(config)
    chat_template = _chat_template(config)
    if chat_template is not None and config.score_template is None:
        # As in vLLM, --chat-template of a reranker is the template of its pairs.
        pairs = describe(EngineConfig(model=config.model, **options)).score_type == "cross-encoder"
        if pairs and ScoreTemplate(source=chat_template).names_roles:
            options["score_template"] = chat_template
    engine = Engine(config.model, cache=config.cache, **options)
    return ServedModel(
        names=config.served_names,
        root=config.model,
        pooling=PoolingModel(engine, PoolerConfig.of(config.pooler_config), task=config.task),
        chat_template=chat_template,
    )


def _chat_template(config: ModelConfig) -> str | None:
    """The template's source; a value without a brace and a line break is the path of a file."""
    value = config.chat_template
    if value is None or "{" in value or "\n" in value:
        return value
    try:
        return Path(value).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise InvalidRequestError(
            f"chat_template={value!r} cannot be read ({error}); pass the path of a Jinja file, or its source"
        ) from None


def _options(config: ModelConfig) -> dict[str, Any]:
    """The arguments that the engine and its configuration share."""
    return {
        "revision": config.revision,
        "device": config.device,
        "dtype": arguments.dtype(config.dtype),
        "max_length": config.max_model_len,
        "pooling": PoolerConfig.of(config.pooler_config).pooling,
        "convert": arguments.conversion(config.convert, config.task),
        "hf_overrides": config.hf_overrides,
        "quantization": config.quantization,
        "max_batch_tokens": config.max_batch_tokens,
        "max_queue": config.max_queue,
        "compile": config.compile,
        "score_template": config.score_template,
    }
