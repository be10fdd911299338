"""Plan: what a call asks for, every default filled in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from millpond.engine.input.text_tokenizer import Tokenized
from millpond.inputs import Pair
from millpond.pooling.pooler import Readout
from millpond.tasks import Activation, Aggregation, OutputDtype, Role, Task, Truncate

Position = Callable[[int], int]  # an item's index in the caller's list, for errors


class EncodesPairs(Protocol):
    """How a cross-encoder reads a query and a document."""

    def encode(
        self,
        pairs: Sequence[Pair],
        *,
        instruction: str | None,
        limit: int,
        truncate: Truncate,
        position: Position,
    ) -> list[Tokenized]:
        """Each pair, ready to run."""
        ...


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a call asks for.

    Attributes:
        task: The task.
        readout: What is read from the hidden states.
        form: How items become tokens: ``text`` as the tokenizer has it, ``colbert`` as a late-interaction checkpoint
            encodes queries and documents.
        role: Which of the two, for ``colbert``.
        prompt: Put before every text.
        skip: Leading tokens that pooling leaves out.
        limit: Most tokens per text.
        truncate: What happens to longer ones.
        width: Columns of the result.
        normalize: L2-normalize the rows after the cut.
        output_dtype: Type of the result.
        activation: What is applied to logits.
        instruction: Fills a reranker's template slot.
        aggregation: How tokens become entities.
        step_tag_id: Only this token's rows are returned.
        adapter: The checkpoint's adapter, by index; -1 for none.
        shares: What several pairs begin with may be computed once.
        pairs: How pairs are read in this call, where not as the checkpoint has it.
        first_kept: Leading rows that a per-token result leaves out.
    """

    task: Task
    readout: Readout
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
