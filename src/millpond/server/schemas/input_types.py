"""Input types: what Cohere's ``input_type`` means to a checkpoint."""

from __future__ import annotations

from millpond.errors import InvalidRequestError
from millpond.params import PoolingParams
from millpond.spec import ModelSpec
from millpond.tasks import ROLES, Role

_ROLES: dict[str, Role] = {
    "search_query": "query",
    "query": "query",
    "search_document": "document",
    "document": "document",
    "passage": "document",
}
# Purposes that are neither: a checkpoint may have an adapter or a prompt for them.
_PURPOSES = {"classification": ("classification",), "clustering": ("clustering", "separation")}


def purpose(input_type: str | None, spec: ModelSpec) -> PoolingParams:
    """The options of a text of ``input_type``.

    A prompt of the checkpoint's by that very name goes first. Otherwise ``search_query`` and ``search_document`` are
    roles, and ``classification`` and ``clustering`` ask for an adapter or a prompt (of that name in any case), or for
    the bare text where the checkpoint has neither.

    Raises:
        InvalidRequestError: An input type that is none of these.
    """
    if input_type is None:
        return PoolingParams()
    if input_type in spec.adapters:
        return PoolingParams(adapter=input_type)
    if input_type in ROLES:  # a late-interaction checkpoint must hear of it, whatever its prompts are called
        return PoolingParams(role=_ROLES[input_type])
    if input_type in spec.prompts:
        return PoolingParams(prompt_name=input_type)
    if input_type in _ROLES:
        return PoolingParams(role=_ROLES[input_type])
    if input_type not in _PURPOSES:
        known = dict.fromkeys(("search_query", "search_document", *_PURPOSES, *sorted(spec.prompts)))
        raise InvalidRequestError(f"Unsupported input_type {input_type!r}; choose one of {', '.join(known)}")
    for name in _PURPOSES[input_type]:
        if name in spec.adapters:
            return PoolingParams(adapter=name)
    prompt = next((name for name in sorted(spec.prompts) if name.lower() == input_type), None)
    return PoolingParams(prompt_name=prompt)
