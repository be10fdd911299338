"""Plan: the options of a call with every default filled in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from millpond.engine.tokenize.tokenized import Tokenized
from millpond.inputs import Pair
from millpond.pooling.pooler import OutputSpec
from millpond.tasks import Activation, Aggregation, OutputDtype, Role, Task, Truncate

IndexOf = Callable[[int], int]  # the index in the caller's list of the i-th item, for errors


class EncodesPairs(Protocol):
    """Reads a query and a document together, for a cross-encoder."""

    def encode(
        self,
        pairs: Sequence[Pair],
        *,
        instruction: str | None,
        limit: int,
        truncate: Truncate,
        index_of: IndexOf,
    ) -> list[Tokenized]:
        """Tokenize each pair."""
        ...


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The options of a call, resolved against the model.

    Attributes:
        task: The task.
        output: Selects the result to read from the hidden states.
        form: How items become tokens: ``text`` by the tokenizer alone, ``colbert`` as a late-interaction checkpoint
            encodes queries and documents.
        role: Query or document, for ``colbert``.
        prompt: Put before every text.
        skip: Leading tokens that pooling leaves out.
        limit: Most tokens per text.
        truncate: How longer texts are handled.
        width: Columns of the result.
        normalize: L2-normalize the rows after the cut.
        output_dtype: Type of the result.
        activation: Applied to logits.
        instruction: Fills a reranker's template slot.
        aggregation: How tokens become entities.
        step_tag_id: Only the rows of this token are returned.
        adapter: Index of the checkpoint's adapter; -1: none.
        shares: Whether a prefix that several pairs begin with may be computed once.
        pairs: Reads the pairs of this call; ``None``: as the checkpoint does.
        first_kept: Leading rows that a per-token result leaves out.
    """

    task: Task
    output: OutputSpec
    form: Literal["text", "colbert"] = "text"
    role: Role | None = None
    prompt: str = ""
    skip: int = 0
    limit: int
    truncate: Truncate
    width: int
    normalize: bool = False
    output_dtype: OutputDtype = "float32"
    activation: Activation = "identity"
    instruction: str | None = None
    aggregation: Aggregation = "none"
    step_tag_id: int | None = None
    adapter: int = -1
    shares: bool = False
    pairs: EncodesPairs | None = None
    first_kept: int = 0
