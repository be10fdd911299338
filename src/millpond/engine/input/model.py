"""LoadedModel: description of a loaded checkpoint and of its inputs, without weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from millpond.backends.backend import OutputSpec
from millpond.checkpoints.layouts.listwise import Listwise
from millpond.checkpoints.templates.score_template import read_template
from millpond.engine.input.encode import InputEncoder
from millpond.engine.input.entity_prompt import EntityPrompt
from millpond.engine.input.pair_tokenizer import TemplateTokenizer
from millpond.engine.input.plan import EncodesPairs
from millpond.tasks import Task
from millpond.values.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A checkpoint, as far as checking, planning and tokenizing its inputs go."""

    spec: ModelSpec  # its public description
    encoder: InputEncoder  # how it reads texts, pairs, queries and documents
    include_prompt: bool  # whether pooling counts the prompt's tokens
    vocabulary: int  # number of token ids; they run from 0 to one less
    outputs: Mapping[Task, OutputSpec]  # what each task reads from the hidden states
    # whether it has a language model's head, whose vocabulary entries can be read one by one
    language_head: bool = False
    listwise: Listwise | None = None  # how it reads a list of documents, if it is a listwise reranker
    most_entries: int | None = None  # how many entries of a sparse vector are kept, the largest; `None`: all
    first_kept: int = 0  # leading rows that `token_embed` leaves out
    mean_maxsim: bool = False  # whether MaxSim is divided by the number of the query's tokens
    entities: EntityPrompt | None = None  # how a GLiNER reads labels and words; `None`: the checkpoint is none
    shares: bool = False  # whether pairs that begin alike may compute their common prefix once

    def pairs_by(self, template: str) -> EncodesPairs:
        """A reader of pairs by a template of the caller's."""
        return TemplateTokenizer(self.encoder.texts, read_template(template))

    def width(self, output: OutputSpec) -> int:
        """Columns of an output's rows."""
        if output.kind == "pooled":
            return self.spec.dimensions
        if output.kind == "tokens":
            return self.spec.hidden_size
        if output.kind == "sparse":
            return 2
        return len(self.labels(output))

    def labels(self, output: OutputSpec) -> tuple[str, ...]:
        """Names of the columns of an output's logits; a vocabulary entry is named by its id."""
        if output.kind == "head_rows":
            return tuple(str(token) for token in output.token_ids)
        labels = self.spec.labels
        return tuple(labels[i] for i in output.token_ids) if output.token_ids else labels
