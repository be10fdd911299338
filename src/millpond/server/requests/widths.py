"""Widths: ``dimensions`` checked against a model, with vLLM's words for what it has none of."""

from __future__ import annotations

from millpond.errors import InvalidDimensionsError
from millpond.server.errors import RequestError
from millpond.server.models import ServedModel


def check(dimensions: int | None, model: ServedModel, *, field: str = "dimensions") -> None:
    """Refuse a width that the model's vectors cannot be cut to.

    Args:
        dimensions: The width; ``None`` is the model's own.
        model: Whose vectors they are.
        field: What the request calls it.

    Raises:
        RequestError: It cannot.
    """
    spec = model.engine.spec
    try:
        spec.check_dimensions(dimensions)
    except InvalidDimensionsError as error:
        name = model.name
        if not spec.matryoshka:
            message = (
                f"Model '{name}' does not support Matryoshka embeddings; dimensions must be unset "
                f"(received dimensions={dimensions}). A model known to be trained for it can be served with "
                "--hf-overrides '{\"is_matryoshka\": true}'."
            )
        elif dimensions is not None and not 1 <= dimensions <= spec.dimensions:
            message = f"Model '{name}' only supports dimensions in range [1, {spec.dimensions}], got {dimensions}."
        elif spec.matryoshka_dimensions is not None:
            listed = list(spec.matryoshka_dimensions)
            message = f"Model '{name}' only supports Matryoshka dimensions {listed}, got {dimensions}."
        else:
            message = str(error)
        raise RequestError(message, param=field) from error
