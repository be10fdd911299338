"""Input types: Cohere's ``input_type`` mapped to the roles, prompts and adapters of a checkpoint."""

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
# Neither a query nor a document: names of the adapter or prompt that a checkpoint may have for them.
_ADAPTERS = {"classification": ("classification",), "clustering": ("clustering", "separation")}


def params_of(input_type: str | None, spec: ModelSpec) -> PoolingParams:
    """The options for texts of ``input_type``.

    A prompt of the checkpoint with exactly that name comes first. Otherwise ``search_query`` and ``search_document``
    are roles, and ``classification`` and ``clustering`` select an adapter or a prompt (its name in any case), or
    nothing if the checkpoint has neither.

    Raises:
        InvalidRequestError: An unknown input type.
    """
    if input_type is None:
        return PoolingParams()
    if input_type in spec.adapters:
        return PoolingParams(adapter=input_type)
    if input_type in ROLES:  # late-interaction checkpoints need the role, even without prompts of these names
        return PoolingParams(role=_ROLES[input_type])
    if input_type in spec.prompts:
        return PoolingParams(prompt_name=input_type)
    if input_type in _ROLES:
        return PoolingParams(role=_ROLES[input_type])
    if input_type not in _ADAPTERS:
        known = dict.fromkeys(("search_query", "search_document", *_ADAPTERS, *sorted(spec.prompts)))
        raise InvalidRequestError(f"Unsupported input_type {input_type!r}; choose one of {', '.join(known)}")
    for name in _ADAPTERS[input_type]:
        if name in spec.adapters:
            return PoolingParams(adapter=name)
    prompt = next((name for name in sorted(spec.prompts) if name.lower() == input_type), None)
    return PoolingParams(prompt_name=prompt)
