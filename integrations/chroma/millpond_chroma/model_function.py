"""ModelFunction: what the dense and the sparse embedding function have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, Self, TypeVar

from millpond.compat.composed import MACHINE, ModelSource
from millpond.errors import FingerprintMismatchError
from millpond.values.fingerprint import ModelIdentity, stored_folder

Source = TypeVar("Source", bound=ModelSource)

_IDENTITY = "identity"


class ModelFunction(Generic[Source]):
    """What the functions have in common: the model, and what Chroma stores of it with a collection.

    The model is loaded when the function is made, and all functions of one configuration share one engine. With a
    collection Chroma stores the model's name, the options that decide a vector, and the model's fingerprint; when it
    makes the function again, the model must have that fingerprint.
    """

    source: type[Source]
    _source: Source

    def _load(self, model: str | None, identity: Mapping[str, Any] | None, options: Mapping[str, Any]) -> None:
        self._source = self.source(model=model, **options)
        spec = self._source.load().spec
        if identity is not None:
            ModelIdentity(**identity).check(spec, owner="collection of this function", another="another collection")

    @classmethod
    def build_from_config(cls, config: dict[str, Any]) -> Self:
        """The function that a collection was made with.

        Args:
            config: What :meth:`get_config` returned.

        Returns:
            The function.

        Raises:
            MillpondError: The model cannot be loaded, or is another one than it was.
        """
        return cls(**config)

    def get_config(self) -> dict[str, Any]:
        """What Chroma stores with a collection; with ``engine=``, the name of the engine's model.

        Returns:
            JSON.
        """
        spec = self._source.load().spec
        options = self._source.model_dump(mode="json", exclude={*MACHINE, "model"}, exclude_defaults=True)
        identity = ModelIdentity.of(spec).to_json()
        return {"model": stored_folder(spec) or self._source.name, **options, _IDENTITY: identity}

    @classmethod
    def validate_config(cls, config: dict[str, Any]) -> None:
        """Raise for what :meth:`build_from_config` cannot take, without loading the model.

        Args:
            config: The configuration.

        Raises:
            ValueError: An option that is unknown or not valid.
        """
        cls.source(**{name: value for name, value in config.items() if name != _IDENTITY})
        ModelIdentity(**config.get(_IDENTITY) or {"fingerprint": "", "model": ""})

    def validate_config_update(self, old_config: dict[str, Any], new_config: dict[str, Any]) -> None:
        """Refuse a function whose vectors do not compare with those of the collection.

        Args:
            old_config: What is stored with the collection.
            new_config: What is to replace it: the model may have moved to another place.

        Raises:
            FingerprintMismatchError: Another model, or other options that decide a vector.
        """
        stored, given = (ModelIdentity(**config[_IDENTITY]) for config in (old_config, new_config))
        if stored.fingerprint != given.fingerprint:
            raise FingerprintMismatchError(
                f"the collection was built by {stored.model} (fingerprint {stored.fingerprint[:12]}), and this "
                f"function is {given.model} ({given.fingerprint[:12]}); vectors of two models do not compare. Use "
                f"{stored.model}, or another collection"
            )
        decide = self.source.model_fields.keys() - {*self.source.loading, "model", "engine"}
        for name in sorted(decide):
            if (old := old_config.get(name)) != (new := new_config.get(name)):
                raise FingerprintMismatchError(
                    f"the collection was built with {name}={old!r}, and this function has {name}={new!r}; such vectors "
                    f"do not compare. Pass {name}={old!r}, or use another collection"
                )

    def is_legacy(self) -> bool:
        """Whether Chroma cannot store the function.

        Returns:
            ``False``.
        """
        return False  # the base class finds out by making another one, which would load the model of engine= again
