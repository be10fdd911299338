"""The bodies of /classify."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from millpond.server.schemas.prompts import PromptRequest
from millpond.server.schemas.usage import UsageInfo
from millpond.tasks import Activation
from millpond.vllm.params import PoolingParams


class ClassificationRequest(PromptRequest):
    """Texts to classify."""

    use_activation: bool | None = Field(
        None, description="Whether logits become probabilities; by default as the model does."
    )
    activation: bool | Activation | None = Field(None, description="The same, or an activation by name.")
    softmax: bool | None = Field(None, description="vLLM's older name for use_activation.")

    def params(self) -> PoolingParams:
        """The options of the call.

        Raises:
            InvalidRequestError: An invalid option.
        """
        return PoolingParams(use_activation=self.use_activation, activation=self.activation, softmax=self.softmax)


class ClassificationData(BaseModel):
    """The classes of a text."""

    index: int
    label: str = Field(description="The most probable class.")
    probs: list[float]
    num_classes: int


class ClassificationResponse(BaseModel):
    """The classes of each text, in the order of the request."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ClassificationData]
    usage: UsageInfo
