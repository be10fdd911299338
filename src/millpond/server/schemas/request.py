"""What every request of OpenAI's and vLLM's dialect may have."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from millpond.server.errors import RequestError
from millpond.server.schemas.absent import absent_if_null
from millpond.vllm_dialect.prompts import Tokenization

INT64 = 1 << 63

Priority = Annotated[int, Field(ge=-INT64, lt=INT64)]


class PoolingRequest(BaseModel):
    """The fields of every request that runs a model; unknown ones are let through, as vLLM does.

    Strict: ``true`` is no number, ``1.0`` no token and ``"5"`` no limit.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = Field(None, description="May be left out where one model serves the task.")
    user: str | None = Field(None, description="The client's own mark; not used.")
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=INT64)] | None = Field(
        None, description="Cut over-long texts to this many tokens; -1 is the model's maximum."
    )
    truncation_side: Literal["left", "right"] | None = Field(None, description="The end of a text that is cut.")
    padding: Literal["max_length", "do_not_pad"] | None = Field(None, description="Texts are never padded here.")
    add_special_tokens: bool | None = Field(
        None, description="Whether texts get their special tokens: by default true for texts, false for messages."
    )
    request_id: Annotated[str, Field(max_length=256)] | None = Field(None, description="Stands in the answer's id.")
    priority: Annotated[Priority, absent_if_null(Priority)] = Field(0, description="Accepted; calls are served fairly.")
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        None, description="Accepted; no request sees another's cached state."
    )
    mm_processor_kwargs: dict[str, Any] | None = Field(None, description="Accepted; texts need none.")

    def tokenization(self, max_model_len: int | None = None, *, special_tokens: bool = True) -> Tokenization:
        """How the texts are to be tokenized.

        Args:
            max_model_len: The model's limit, above which nothing can be asked for.
            special_tokens: What an absent ``add_special_tokens`` means.

        Raises:
            RequestError: A limit that the model cannot reach.
            InvalidRequestError: A padding that would change nothing but the cost.
        """
        limit = self.truncate_prompt_tokens
        if limit is not None and max_model_len is not None and limit > max_model_len:
            raise RequestError(
                "truncate_prompt_tokens value is greater than max_model_len. Please request a smaller truncation size.",
                param="truncate_prompt_tokens",
            )
        wanted = self.add_special_tokens
        return Tokenization.of(
            {
                "truncate_prompt_tokens": limit,
                "truncation_side": self.truncation_side,
                "padding": self.padding,
                "add_special_tokens": special_tokens if wanted is None else wanted,
            }
        )
