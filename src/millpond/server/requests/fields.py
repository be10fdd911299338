"""Fields of every request in OpenAI's or vLLM's format, and how many texts, of which length, one may have."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticUseDefault

from millpond.server.errors import RequestError
from millpond.server.state import state_of
from millpond.vllm.prompts import Tokenization


def absent_if_null(kind: Any) -> BeforeValidator:
    """A validator for the ``Annotated`` type of a field of ``kind`` whose default is not null."""

    def default(value: Any) -> Any:
        if value is None:
            raise PydanticUseDefault
        return value

    return BeforeValidator(default, json_schema_input_type=kind | None)


def one_of(first: str, second: str) -> Any:
    """A validator of a request that has to have one of two fields."""

    def check(self: BaseModel) -> BaseModel:
        if (getattr(self, first) is None) is (getattr(self, second) is None):
            raise ValueError(f"pass {first} or {second}, one of them")
        return self

    return model_validator(mode="after")(check)


INT64 = 1 << 63

Priority = Annotated[int, Field(ge=-INT64, lt=INT64)]


class PoolingRequest(BaseModel):
    """The fields of every request that runs a model; unknown fields are ignored, as in vLLM.

    Strict: ``true`` is not a number, ``1.0`` not a token id and ``"5"`` not a limit.
    """

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = Field(None, description="Optional if only one model serves the task.")
    user: str | None = Field(None, description="Identifies the client's user; ignored.")
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=INT64)] | None = Field(
        None, description="Cut longer texts to this many tokens; -1 is the model's maximum."
    )
    truncation_side: Literal["left", "right"] | None = Field(None, description="Which end of a text is cut.")
    padding: Literal["max_length", "do_not_pad"] | None = Field(None, description="Accepted; texts are never padded.")
    add_special_tokens: bool | None = Field(
        None, description="Whether to add special tokens: by default true for texts, false for messages."
    )
    request_id: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="Becomes part of the answer's id."
    )
    priority: Annotated[Priority, absent_if_null(Priority)] = Field(
        0, description="Accepted and ignored; calls are scheduled fairly."
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        None, description="Accepted and ignored; requests share no state."
    )
    mm_processor_kwargs: dict[str, Any] | None = Field(
        None, description="Accepted and ignored; only texts are supported."
    )

    def tokenization(self, max_model_len: int | None = None, *, special_tokens: bool = True) -> Tokenization:
        """How the texts are tokenized."""
        limit = self.truncate_prompt_tokens
        if limit is not None and max_model_len is not None and limit > max_model_len:
            raise RequestError(
                "truncate_prompt_tokens value is greater than max_model_len. Please request a smaller truncation size.",
                param="truncate_prompt_tokens",
            )
        return Tokenization.of(
            {
                "truncate_prompt_tokens": limit,
                "truncation_side": self.truncation_side,
                "padding": self.padding,
                "add_special_tokens": special_tokens if self.add_special_tokens is None else self.add_special_tokens,
            }
        )


# A longer text is not tokenized in full. The limit is the larger of these two; the second is per token of the model.
_MAX_CHARACTERS = 1 << 21
_MAX_CHARACTERS_PER_TOKEN = 64


def check_count(request: Request, count: int, *, field: str) -> None:
    """Refuse a request with more texts than the server accepts."""
    limit = state_of(request).config.max_inputs
    if count > limit:
        raise RequestError(
            f"{count} {field} in one request; this server takes {limit}: send them in parts", param=field
        )


def check_length(text: str, max_model_len: int) -> None:
    """Refuse a text whose full tokenization would take gigabytes."""
    limit = max(_MAX_CHARACTERS, _MAX_CHARACTERS_PER_TOKEN * max_model_len)
    if len(text) > limit:
        raise RequestError(
            f"a text has {len(text)} characters; {limit} are the most to be tokenized whole: send it in parts"
        )
