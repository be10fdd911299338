"""ModelSpec: the description of a checkpoint, as plain data. No torch, no weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from millpond.support.cached_property import cached_property
from millpond.tasks import Role, ScoreType, Similarity, Task
from millpond.vectors import matryoshka

# The prompt names of a role; the first that the checkpoint has is used, as in sentence-transformers' encode_document.
_ROLE_PROMPTS: dict[Role, tuple[str, ...]] = {
    "query": ("query", "retrieval.query"),
    "document": ("document", "passage", "corpus", "retrieval.passage"),
}

PoolingMode = Literal["cls", "mean", "max", "mean_sqrt_len", "weightedmean", "lasttoken"]


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The description of a checkpoint, known before the first forward pass.

    Attributes:
        name: The hub id or folder the engine was given.
        architecture: ``architectures[0]`` of its config (of the architecture table, if the config names none).
        model_type: transformers' ``model_type``, the key of the architecture table.
        pooling: Pooling modes, whose vectors are concatenated in this order; nearly every checkpoint has one.
        has_layers: Whether layers (Dense, LayerNorm) follow the pooling, so that a vector is no mean of token rows.
        normalize: Whether the checkpoint L2-normalizes its vectors.
        has_modules: Whether the checkpoint's files list its modules (modules.json), and with them pooling and
            normalization; otherwise these are the defaults of its family.
        dimensions: Width of a vector of ``embed``.
        hidden_size: Width of a row of ``token_embed``.
        default_dimensions: Width of ``embed``'s vectors if the caller names none (``truncate_dim`` of
            sentence-transformers); ``None``: ``dimensions``, which a caller may name in any case.
        matryoshka: Whether vectors may be cut to fewer dimensions.
        matryoshka_dimensions: The widths that it was trained for; ``None`` if it declares no list.
        matryoshka_smallest: The least width, if it declares no list.
        prompts: The checkpoint's prompts by name.
        default_prompt_name: The prompt used if the caller names none.
        labels: Class names by index; empty for an embedder.
        entailment_id: Of a model of natural language inference: the index of entailment among ``labels``, with which
            ``classify`` takes labels of the caller's own.
        activation: Activation that the checkpoint applies to its logits: ``identity``, ``sigmoid``, ``softmax``, or a
            class of ``torch.nn`` by name, such as ``Tanh``.
        score_type: What ``score`` computes by default: a cross-encoder's score, one that depends on the other documents
            of the query (``listwise``), MaxSim (``late-interaction``) or ``similarity`` of two vectors
            (``bi-encoder``); ``None`` if a pair does not have a single score.
        codes: Whether its vectors are whole numbers from -127 to 127 (pplx-embed), which ``output_dtype="int8"`` keeps.
        similarity: How ``score`` compares two vectors: ``similarity_fn_name`` of sentence-transformers. Distances
            (``euclidean``, ``manhattan``) are negative, so that more is nearer.
        step_tag_id: Of process reward models: the token whose rows are rewards.
        adapters: Names of the adapters that a request may choose.
        max_length: Most tokens per text, special tokens and prompt included.
        tasks: Tasks that the checkpoint serves.
        settings: What besides the files is part of the fingerprint, as JSON: the hub revision and the engine's options
            (``max_length``, ``pooling``, ``quantization``, ...) with the values in effect, to name those that differ.
    """

    name: str
    architecture: str
    model_type: str
    pooling: tuple[PoolingMode, ...]
    has_layers: bool = False
    normalize: bool
    dimensions: int
    hidden_size: int
    matryoshka: bool
    matryoshka_dimensions: tuple[int, ...] | None
    matryoshka_smallest: int = 1
    default_dimensions: int | None = None
    prompts: Mapping[str, str] = field(hash=False)
    default_prompt_name: str | None
    labels: tuple[str, ...]
    entailment_id: int | None = None
    activation: str = "identity"
    score_type: ScoreType | None = None
    codes: bool = False
    similarity: Similarity = "cosine"
    step_tag_id: int | None = None
    adapters: tuple[str, ...] = ()
    max_length: int
    has_modules: bool = True
    tasks: frozenset[Task]
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False, hash=False, compare=False)
    digest: Callable[[], str] = field(repr=False, compare=False)  # picklable, like the rest of the spec

    @property
    def rerank_type(self) -> ScoreType | None:
        """What ``rerank`` computes by default: ``score_type``, but for an embedder MaxSim over its token states.

        The cosine of its vectors would sort documents as the search that found them did.
        """
        return "late-interaction" if self.score_type == "bi-encoder" else self.score_type

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that decides a text's vector but the precision: weights, tokenizer, pooling, length.

        Computed on first use, since it reads every weight file (of a hub checkpoint only the revision is hashed).

        Raises:
            ModelLoadError: A file has changed since the checkpoint was read.
        """
        return self.digest()

    def role_prompt(self, role: Role) -> str | None:
        """The checkpoint's prompt for a role; ``None`` if it has none, which is not its default prompt either.

        Args:
            role: ``"query"`` or ``"document"``.

        Returns:
            The text that is put before an input, or ``None``.
        """
        return next((self.prompts[name] for name in _ROLE_PROMPTS[role] if name in self.prompts), None)

    def check_dimensions(self, dimensions: int | None) -> int:
        """Check a requested width and return that of ``embed``'s vectors.

        Args:
            dimensions: The requested width; ``None`` is the default one.

        Returns:
            The width of the vectors.

        Raises:
            InvalidDimensionsError: The checkpoint's vectors cannot be cut to it.
        """
        return matryoshka.check(
            dimensions,
            native=self.dimensions,
            trained=self.matryoshka,
            declared=self.matryoshka_dimensions,
            model=self.name,
            smallest=self.matryoshka_smallest,
            default=self.default_dimensions,
        )
