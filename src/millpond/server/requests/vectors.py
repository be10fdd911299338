"""Vector requests: options for the role, the width and the encoding of vectors."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from millpond.errors import InvalidRequestError
from millpond.server.errors import RequestError
from millpond.server.requests.fields import absent_if_null
from millpond.server.requests.prompts import PromptRequest
from millpond.server.responses.encoding import EmbedDtype, EncodingFormat, Endianness, NumberFormat
from millpond.tasks import ROLES, Role
from millpond.values.spec import ModelSpec
from millpond.vllm.params import PoolingParams

_ROLES: dict[str, Role] = {
    "search_query": "query",
    "query": "query",
    "search_document": "document",
    "document": "document",
    "passage": "document",
}
_DEFAULT = PoolingParams()
# Neither a query nor a document: names of the adapter or prompt that a checkpoint may have for them.
_ADAPTERS = {"classification": ("classification",), "clustering": ("clustering", "separation")}


def input_type_params(input_type: str | None, spec: ModelSpec) -> PoolingParams:
    """The options for texts of ``input_type``.

    A prompt of the checkpoint with exactly that name comes first. Otherwise ``search_query`` and ``search_document``
    are roles, and ``classification`` and ``clustering`` select an adapter or a prompt (its name in any case), or
    nothing if the checkpoint has neither.
    """
    if input_type is None:
        return _DEFAULT
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


class VectorRequest(PromptRequest):
    """The fields of a request for vectors."""

    encoding_format: Annotated[EncodingFormat, absent_if_null(EncodingFormat)] = Field(
        "float", description="JSON numbers, base64, or binary (`bytes`, `bytes_only`)."
    )
    embed_dtype: Annotated[EmbedDtype, absent_if_null(EmbedDtype)] = Field(
        "float32", description="Type of the numbers in base64 and binary."
    )
    endianness: Annotated[Endianness, absent_if_null(Endianness)] = Field(
        "little", description="Byte order of the numbers."
    )
    dimensions: int | None = Field(None, description="Matryoshka width: the vector is cut, then normalized.")
    normalize: bool | None = Field(None, description="L2-normalize; by default as the model does.")
    use_activation: bool | None = Field(None, description="vLLM's name for `normalize`, and for `activation`.")
    role: Literal["query", "document", "passage"] | None = Field(
        None, description="Add the model's prompt for a query or a document; by default none is added."
    )
    prompt_name: str | None = Field(None, description="Name of one of the model's prompts.")
    input_type: str | None = Field(
        None,
        description="`query`, `search_query`, `document`, `search_document`, `passage`, `classification`, "
        "`clustering`, or the name of a prompt or an adapter of the model.",
    )

    def vector_params(self, spec: ModelSpec) -> PoolingParams:
        """The options of a call for vectors."""
        fields = (("role", self.role), ("prompt_name", self.prompt_name), ("input_type", self.input_type))
        present = {name: value for name, value in fields if value is not None}
        if len(present) > 1:
            listed = ", ".join(f"{name}={value!r}" for name, value in present.items())
            raise RequestError(f"{listed} exclude each other; pass one", param=next(iter(present)))
        params = (
            input_type_params(self.role or self.input_type, spec)
            if self.prompt_name is None
            else PoolingParams(prompt_name=self.prompt_name)
        )
        changes = (
            ("dimensions", self.dimensions),
            ("normalize", self.normalize),
            ("use_activation", self.use_activation),
        )
        given: dict[str, Any] = {name: value for name, value in changes if value is not None}
        return replace(params, **given) if given else params

    @property
    def number_format(self) -> NumberFormat:
        """How the response writes its numbers."""
        return NumberFormat(encoding=self.encoding_format, dtype=self.embed_dtype, order=self.endianness)

    @property
    def bytes_per_number(self) -> float:
        """Bytes of a number in the response."""
        return self.number_format.bytes_per_number

    @property
    def selects_prompt(self) -> bool:
        """Whether the request selects a prompt of the model."""
        return (self.role, self.prompt_name, self.input_type) != (None, None, None)
