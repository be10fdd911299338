"""The bodies of /pooling."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from millpond.server.schemas.request import INT64
from millpond.server.schemas.usage import UsageInfo
from millpond.server.schemas.vectors import VectorRequest
from millpond.spec import ModelSpec
from millpond.tasks import Activation, Task
from millpond.vllm.params import PoolingParams

TokenId = Annotated[int, Field(ge=0, lt=INT64)]


class PoolingTaskRequest(VectorRequest):
    """Prompts for any task."""

    task: str | None = Field(
        None,
        description="`embed`, `classify`, `token_embed`, `token_classify` or `reward`; by default the "
        "model's own task.",
    )
    activation: bool | Activation | None = Field(
        None, description="Applied to logits: on, off, or an activation by name."
    )
    softmax: bool | None = Field(None, description="vLLM's older name for `activation`.")
    step_tag_id: TokenId | None = Field(None, description="Step rewards: keep the rows of this token.")
    returned_token_ids: list[TokenId] | None = Field(None, description="Step rewards: keep these columns.")

    def params(self, task: Task, spec: ModelSpec) -> PoolingParams:
        """The options of ``task``.

        Raises:
            RequestError: As :meth:`vector_params`.
            InvalidRequestError: An invalid option.
        """
        ids = self.returned_token_ids
        return replace(
            self.vector_params(spec),
            activation=self.activation,
            softmax=self.softmax,
            step_tag_id=self.step_tag_id,
            returned_token_ids=None if ids is None else tuple(ids),
        )


class PoolingData(BaseModel):
    """The result of a prompt."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float] | list[list[float]] | str = Field(description="One row, one row per token, or a base64 string.")
    shape: list[int] | None = Field(None, description="Rows and columns of a base64 matrix.")


class PoolingResponse(BaseModel):
    """A result for each prompt, in the order of the request."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PoolingData]
    usage: UsageInfo
