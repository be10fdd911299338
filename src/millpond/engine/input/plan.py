"""Plan: the options of a call with every default filled in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from millpond.backends.backend import OutputSpec
from millpond.engine.tokenize.tokenized import Tokenized
from millpond.tasks import Aggregation, OutputDtype, Role, Task, Truncate
from millpond.values.inputs import Pair

IndexOf = Callable[[int], int]  # the index in the caller's list of the i-th item, for errors


class EncodesPairs(Protocol):
    """Reads a query and a document together, for a cross-encoder."""

    def encode(
        self, pairs: Sequence[Pair], *, instruction: str | None, limit: int, truncate: Truncate, index_of: IndexOf
    ) -> list[Tokenized]:
        """Tokenize each pair."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The options of a call, resolved against the model."""

    task: Task
    output: OutputSpec  # selects the result to read from the hidden states
    # how items become tokens: `text` by the tokenizer alone, `colbert` as a late-interaction checkpoint encodes
    # queries and documents
    form: Literal["text", "colbert"] = "text"
    role: Role | None = None  # query or document, for `colbert`
    prompt: str = ""  # put before every text
    skip: int = 0  # leading tokens that pooling leaves out
    limit: int  # most tokens per text
    truncate: Truncate  # how longer texts are handled
    width: int  # columns of the result
    normalize: bool = False  # L2-normalize the rows after the cut
    output_dtype: OutputDtype = "float32"
    codes: bool = False  # the rows are whole numbers, which int8 keeps
    activation: str = "identity"  # applied to logits
    instruction: str | None = None  # fills a reranker's template slot
    aggregation: Aggregation = "none"  # how tokens become entities
    step_tag_id: int | None = None  # only the rows of this token are returned
    adapter: int = -1  # index of the checkpoint's adapter; -1: none
    shares: bool = False  # whether a prefix that several pairs begin with may be computed once
    pairs: EncodesPairs | None = None  # reads the pairs of this call; `None`: as the checkpoint does
    most_entries: int | None = None  # how many entries of a sparse vector are kept, the largest; `None`: all
    first_kept: int = 0  # leading rows that a per-token result leaves out
