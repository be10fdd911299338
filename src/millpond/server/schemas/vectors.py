"""Requests for vectors: what they are made for, how wide they are, how they are written."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from millpond.params import PoolingParams
from millpond.server.encoding import EmbedDtype, EncodingFormat, Endianness
from millpond.server.errors import RequestError
from millpond.server.schemas import input_types
from millpond.server.schemas.absent import absent_if_null
from millpond.server.schemas.prompts import PromptRequest
from millpond.spec import ModelSpec


class VectorRequest(PromptRequest):
    """The fields of a request whose answer holds vectors."""

    encoding_format: Annotated[EncodingFormat, absent_if_null(EncodingFormat)] = Field(
        "float", description="JSON numbers, base64, or an octet stream."
    )
    embed_dtype: Annotated[EmbedDtype, absent_if_null(EmbedDtype)] = Field(
        "float32", description="The numbers' type, of base64 and bytes."
    )
    endianness: Annotated[Endianness, absent_if_null(Endianness)] = Field("little", description="Their byte order.")
    dimensions: int | None = Field(None, description="Matryoshka width: the vector is cut, then normalized.")
    normalize: bool | None = Field(None, description="L2-normalize; by default as the model does.")
    use_activation: bool | None = Field(None, description="vLLM's name for `normalize`, and for `activation`.")
    role: Literal["query", "document", "passage"] | None = Field(
        None, description="Apply the model's prompt for a query or a document; none is applied by default."
    )
    prompt_name: str | None = Field(None, description="One of the model's prompts by name.")
    input_type: str | None = Field(
        None,
        description="`query`, `search_query`, `document`, `search_document`, `passage`, `classification`, "
        "`clustering`, or a prompt or an adapter of the model by name.",
    )

    def vector_params(self, spec: ModelSpec) -> PoolingParams:
        """The options that vectors have.

        Raises:
            RequestError: Two fields that say one thing.
            InvalidRequestError: An input type that the model does not know, or an option that makes no sense.
        """
        given = {name: getattr(self, name) for name in ("role", "prompt_name", "input_type")}
        said = {name: value for name, value in given.items() if value is not None}
        if len(said) > 1:
            listed = ", ".join(f"{name}={value!r}" for name, value in said.items())
            raise RequestError(f"{listed} exclude each other; pass one", param=next(iter(said)))
        purpose = PoolingParams(prompt_name=self.prompt_name)
        if self.prompt_name is None:
            purpose = input_types.purpose(self.role or self.input_type, spec)
        return replace(
            purpose, dimensions=self.dimensions, normalize=self.normalize, use_activation=self.use_activation
        )

    @property
    def has_purpose(self) -> bool:
        """Whether a prompt of the model's is asked for."""
        return (self.role, self.prompt_name, self.input_type) != (None, None, None)
