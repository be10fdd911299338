"""IndexSettings: how texts became the rows of an index. It is stored with them, for a query must become rows alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millpond.errors import FingerprintMismatchError, InvalidRequestError
from millpond.late_interaction.encoding.projection import FloatArray, Projection
from millpond.values.fingerprint import ModelIdentity, stored_name
from millpond.values.spec import ModelSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class IndexSettings:
    """What turns a text into rows, besides the text."""

    model: ModelIdentity | None  # the model; `None` if the index was filled without an engine
    native: int  # columns of the model's rows
    pool_factor: int  # mean tokens of a document that became one row
    projection: Projection | None  # the map to the index's width; `None` if it is the model's

    @property
    def width(self) -> int:
        """Columns of a stored row."""
        return self.native if self.projection is None else self.projection.width

    def check(self, spec: ModelSpec | None, *, dimensions: int | None, pool_factor: int | None, owner: str) -> None:
        """Compare with the engine and the options, ``None`` if not named, that ``owner`` (in errors) is opened with.

        Raises:
            FingerprintMismatchError: The index was filled by another model.
            InvalidRequestError: It has another width or factor.
        """
        for name, named, stored in (
            ("dimensions", dimensions, self.width),
            ("pool_factor", pool_factor, self.pool_factor),
        ):
            if named is not None and named != stored:
                raise InvalidRequestError(
                    f"{name}={named} is not that of {owner}, which has {stored}; leave {name} out, or build another one"
                )
        if spec is None:
            return
        if self.model is not None:
            self.model.check(spec, owner=owner, another="build another index")
        if spec.hidden_size != self.native:
            raise FingerprintMismatchError(
                f"{owner} was filled with rows of {self.native} columns, and those of {stored_name(spec)} have "
                f"{spec.hidden_size}; use the model of its rows, or build another index"
            )

    def to_json(self) -> dict[str, Any]:
        """The settings but the projection's matrix, which is stored as an array."""
        identity = None if self.model is None else self.model.to_json()
        return {"model": identity, "native": self.native, "width": self.width, "pool_factor": self.pool_factor}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], matrix: FloatArray | None) -> IndexSettings:
        """The settings of :meth:`to_json` and ``projection.matrix``; KeyError, TypeError or ValueError if damaged."""
        model = content["model"]
        for name in ("native", "pool_factor"):
            if type(content[name]) is not int or content[name] < 1:
                raise ValueError(f"{name} {content[name]!r} is not an int from 1")
        settings = cls(
            model=None if model is None else ModelIdentity(**model),
            native=content["native"],
            pool_factor=content["pool_factor"],
            projection=None if matrix is None else Projection(matrix),
        )
        projection = settings.projection
        if settings.width != content["width"] or (projection is not None and projection.native != settings.native):
            raise ValueError(f"the projection does not make rows of {content['width']} columns of {settings.native}")
        return settings
