"""MillpondEncoder: one vector of each text, for every kind of task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from mteb import similarity_functions
from mteb.models.abs_encoder import AbsEncoder, PromptSource
from mteb.types import PromptType

from millpond.mteb.base import EngineModel
from millpond.mteb.prompts import task_prompt
from millpond.tasks import Role

Template = str | Callable[[str, Any], str]


class MillpondEncoder(EngineModel, AbsEncoder):
    """An embedder.

    Prompts are those of mteb's wrapper of sentence-transformers for the same files. With ``instruction_template`` they
    are mteb's instruction for the task, as its ``InstructSentenceTransformerModel`` writes it.

    Args:
        model: As of :class:`~millpond.mteb.base.EngineModel`, like ``revision``, ``device`` and the other options.
        revision: See there.
        device: See there.
        model_prompts: Prompts by task, type of task or role, instead of the checkpoint's.
        embed_dim: Matryoshka width of the vectors.
        instruction_template: Text with ``{instruction}``, or a function of the instruction and the role.
        apply_instruction_to_passages: Whether documents get the instruction, too.
        prompts_dict: Instructions by task, type of task or role, instead of mteb's.
        prompt_priority: The order of mteb's sources of instructions.
        **options: See there.
    """

    task = "embed"
    model_type = "dense"

    def __init__(
        self,
        model: str | None = None,
        revision: str | None = None,
        *,
        device: str | None = None,
        model_prompts: Mapping[str, str] | None = None,
        embed_dim: int | None = None,
        instruction_template: Template | None = None,
        apply_instruction_to_passages: bool = True,
        prompts_dict: dict[str, str] | None = None,
        prompt_priority: Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        self._dimensions = embed_dim
        super().__init__(model, revision, device=device, **options)
        self.engine.spec.check_dimensions(embed_dim)
        self.model_prompts = model_prompts
        self.instruction_template = instruction_template
        self.prompts_dict = prompts_dict
        if prompt_priority is not None:
            self.prompt_priority = [PromptSource.from_str(source) for source in prompt_priority]
        self._instructs_passages = apply_instruction_to_passages
        self.name_experiment(embed_dim=embed_dim)

    def _width(self) -> int:
        return self._dimensions or self.engine.spec.default_dimensions or self.engine.spec.dimensions

    def encode(
        self,
        inputs: Any,
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        prompt_type: Any = None,
        **kwargs: Any,
    ) -> npt.NDArray[Any]:
        """The vectors of all texts of a loader, ``[n, d]``.

        Args:
            inputs: mteb's loader of batches.
            task_metadata: The task, which chooses the prompt.
            hf_split: Its split; not read.
            hf_subset: Its subset; not read.
            prompt_type: Whether the texts are queries or documents; ``None``: neither.
            **kwargs: ``show_progress_bar`` and ``precision`` (``output_dtype`` of the engine).

        Returns:
            A row for each text.
        """
        texts = [text for batch in inputs for text in batch["text"]]
        role, prompt = self._prompt(task_metadata, prompt_type)
        return self.engine.embed(
            texts,
            role=role,
            prompt=prompt,
            dimensions=self._dimensions,
            output_dtype=kwargs.get("precision") or "float32",
            show_progress=kwargs.get("show_progress_bar", True),
        ).embeddings

    def _prompt(self, task_metadata: Any, prompt_type: Any) -> tuple[Role | None, str]:
        """The role and the prompt of texts."""
        if self.instruction_template is None:
            role: Role | None = None if prompt_type is None else prompt_type.value
            return role, task_prompt(self.engine.spec, self.model_prompts, task_metadata, prompt_type)
        if prompt_type == PromptType.document and not self._instructs_passages:
            # A call without a prompt gets sentence-transformers' default one.
            return None, self.engine.spec.prompts.get(self.engine.spec.default_prompt_name or "", "")
        return None, self.get_task_instruction(task_metadata, prompt_type)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Any:
        """The checkpoint's similarity of all pairs, ``[n, m]``."""
        left, right = np.atleast_2d(embeddings1), np.atleast_2d(embeddings2)
        if self.engine.spec.similarity == "manhattan":
            from scipy.spatial.distance import cdist

            return -cdist(left, right, "cityblock")
        return _FUNCTIONS[self.engine.spec.similarity][0](left, right)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Any:
        """The checkpoint's similarity of each pair, ``[n]``."""
        if self.engine.spec.similarity == "manhattan":
            return -np.abs(np.asarray(embeddings1) - np.asarray(embeddings2)).sum(axis=-1)
        return _FUNCTIONS[self.engine.spec.similarity][1](embeddings1, embeddings2)


_FUNCTIONS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "cosine": (similarity_functions.cos_sim, similarity_functions.pairwise_cos_sim),
    "dot": (similarity_functions.dot_score, similarity_functions.pairwise_dot_score),
    "euclidean": (similarity_functions.euclidean_sim, similarity_functions.pairwise_euclidean_sim),
}
