"""What all models share: the engine, and what mteb writes about the model beside its results."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar

from mteb.models.model_implementations import MODEL_REGISTRY
from mteb.models.model_meta import ModelMeta, ScoringFunction

from millpond.compat.composed import ModelSource
from millpond.engine.engine import Engine
from millpond.errors import UnsupportedTaskError
from millpond.tasks import Task
from millpond.values.config import EngineConfig

# Options that change no vector, or are named otherwise.
_UNNAMED = frozenset("model revision device backend dtype max_batch_tokens max_queue compile trust_remote_code".split())


class EngineModel:
    """A model of mteb over an engine.

    Args:
        model: Hub id or local folder.
        revision: Branch, tag or commit of a hub id.
        device: As of :class:`~millpond.Engine`.
        **options: ``engine=``, a loaded engine instead of a model; or the engine's options, also as
            sentence-transformers calls them, so that the class may be the ``loader`` of mteb's own metadata.

    Raises:
        UnsupportedTaskError: The checkpoint does not serve what the class computes.
    """

    task: ClassVar[Task]
    model_type: ClassVar[str]

    def __init__(
        self, model: str | None = None, revision: str | None = None, *, device: str | None = None, **options: Any
    ) -> None:
        source = ModelSource(model=model, revision=revision, device=device or "auto", **options)
        self.engine = source.load()
        self._check()
        self.mteb_model_meta = self._meta()

    def _check(self) -> None:
        spec = self.engine.spec
        if self.task not in spec.tasks:
            raise UnsupportedTaskError(
                f"{spec.name} does not serve {self.task}, which {type(self).__name__} computes; "
                "millpond.mteb.model_of chooses the class by what a checkpoint is"
            )

    @property
    def similarity_name(self) -> ScoringFunction | None:
        """How mteb calls the similarity of two results."""
        return ScoringFunction(self.engine.spec.similarity)

    def _meta(self) -> Any:
        """What is known of the model; results of other files or options are kept apart by its revision and options.

        What mteb knows of a published model by its name is kept. A local folder's revision is its fingerprint.
        """
        spec = self.engine.spec
        revision = spec.settings["revision"]
        name = f"local/{Path(spec.name).name}" if revision is None else spec.name
        return (MODEL_REGISTRY.get(name) or ModelMeta.create_empty()).model_copy(
            update={
                "name": name,
                "revision": revision or spec.fingerprint[:40],
                "loader": type(self),
                "loader_kwargs": {},
                "max_tokens": spec.max_length,
                "embed_dim": self._width(),
                "similarity_fn_name": self.similarity_name,
                "model_type": [self.model_type],
                "experiment_kwargs": changed_options(self.engine) or None,
            }
        )

    def _width(self) -> int | None:
        return None

    def name_experiment(self, **options: Any) -> None:
        """Keep the results apart from those without these options; ``None`` is none."""
        given = {name: value for name, value in options.items() if value is not None}
        if given:
            experiment = {**(self.mteb_model_meta.experiment_kwargs or {}), **given}
            self.mteb_model_meta = self.mteb_model_meta.model_copy(update={"experiment_kwargs": experiment})


def changed_options(engine: Engine) -> dict[str, Any]:
    """The options of an engine that change its results, where they are not the default; and a dtype but float32."""
    default = EngineConfig(model=engine.config.model)
    changed = {
        field.name: value
        for field in fields(EngineConfig)
        if field.name not in _UNNAMED and (value := getattr(engine.config, field.name)) != getattr(default, field.name)
    }
    return changed | ({} if engine.dtype == "float32" else {"dtype": engine.dtype})
