"""PoolingParams: what one request asks for, valid from construction."""

from __future__ import annotations

from dataclasses import dataclass, fields

from millpond.errors import InvalidRequestError
from millpond.tasks import OUTPUT_DTYPES, ROLES, TASKS, TRUNCATIONS, OutputDtype, Role, Task, Truncate


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """The options of one request, for every task; which of them a task reads is checked by the engine.

    Attributes:
        task: The task, where the method does not already name it.
        dimensions: Matryoshka width; ``None`` is the checkpoint's own.
        normalize: L2-normalize; ``None`` is the checkpoint's own habit.
        activation: Apply the activation to scores and labels; ``None`` is the checkpoint's own habit.
        use_activation: vLLM's newer name for ``normalize`` (embed tasks) and ``activation`` (the others).
        step_tag_id: Step reward models: the token whose rows are kept.
        returned_token_ids: Step reward models: the columns that are kept.
        role: ``"query"`` or ``"document"``: applies the checkpoint's own prompt for it.
        prompt: Text put before every input; ``""`` switches a default prompt off.
        prompt_name: Name of one of the checkpoint's prompts.
        instruction: Fills an LLM reranker's template slot.
        truncate: Which end of an over-long text is cut, or ``"error"``.
        truncate_prompt_tokens: Cut to this many tokens instead of the model's maximum (-1 is the maximum).
        output_dtype: Type of the returned vectors.
    """

    task: Task | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    activation: bool | None = None
    use_activation: bool | None = None
    step_tag_id: int | None = None
    returned_token_ids: tuple[int, ...] | None = None
    role: Role | None = None
    prompt: str | None = None
    prompt_name: str | None = None
    instruction: str | None = None
    truncate: Truncate = "end"
    truncate_prompt_tokens: int | None = None
    output_dtype: OutputDtype = "float32"

    def __post_init__(self) -> None:
        _one_of("task", self.task, TASKS)
        _one_of("role", self.role, ROLES)
        _one_of("truncate", self.truncate, TRUNCATIONS, optional=False)
        _one_of("output_dtype", self.output_dtype, OUTPUT_DTYPES, optional=False)
        for name in ("normalize", "activation", "use_activation"):
            if not isinstance(value := getattr(self, name), bool | None):
                raise InvalidRequestError(f"{name}={value!r} must be True, False or None")
        for name in ("prompt", "prompt_name", "instruction"):
            if not isinstance(value := getattr(self, name), str | None):
                raise InvalidRequestError(f"{name}={value!r} must be a str or None")
        if self.prompt is not None and self.prompt_name is not None:
            raise InvalidRequestError(
                f"prompt={self.prompt!r} and prompt_name={self.prompt_name!r} exclude each other; pass one"
            )
        limit = self.truncate_prompt_tokens
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < -1 or limit == 0):
            raise InvalidRequestError(f"truncate_prompt_tokens={limit!r} must be a positive int, or -1 for the maximum")

    def given(self) -> frozenset[str]:
        """Names of the fields that differ from their defaults."""
        return frozenset(f.name for f in fields(self) if getattr(self, f.name) != f.default)


def _one_of(name: str, value: object, choices: tuple[str, ...], *, optional: bool = True) -> None:
    if (value is None and optional) or (isinstance(value, str) and value in choices):
        return
    raise InvalidRequestError(f"{name}={value!r} is unknown; choose one of {', '.join(choices)}")
