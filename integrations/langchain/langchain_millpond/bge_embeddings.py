"""MillpondBgeEmbeddings: the vectors of LangChain's HuggingFaceBgeEmbeddings, by a millpond engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from langchain_millpond.embeddings import MillpondEmbeddings
from millpond.compat.prompts import AUTO, PromptOptions, bge_instruction, default_prompt
from millpond.tasks import Role

if TYPE_CHECKING:
    from millpond import Engine


class MillpondBgeEmbeddings(MillpondEmbeddings):
    """Text embeddings as ``HuggingFaceBgeEmbeddings`` made them, so that an index built with it stays valid.

    It takes the arguments of that class. Its own instruction is put before every query, unless ``query_instruction``
    (here also ``query_prompt``) names another, and ``embed_instruction`` (``document_prompt``), if given, before every
    document; newlines become spaces. Everything else is as in :class:`MillpondEmbeddings`; ``dtype="float32"`` gives
    the vectors to the last digits.

    A new index needs it not: ``MillpondEmbeddings(model=..., query_prompt="auto")`` has the instruction of the model
    card, which says "sentence" where this class says "question".
    """

    replaced = "HuggingFaceBgeEmbeddings"

    def _prompts(self) -> dict[Role, PromptOptions]:
        own: dict[Role, str] = {"query": bge_instruction(self.model_name), "document": ""}
        given = super()._prompts()
        return {role: PromptOptions(text=own[role]) if given[role] == PromptOptions() else given[role] for role in own}

    def _prompt(self, engine: Engine, role: Role) -> str | None:
        prompt = super()._prompt(engine, role)
        text = self._prompts()[role].text
        # encode() puts the checkpoint's default prompt before the class's own.
        return prompt if prompt is None or text in (None, AUTO) else default_prompt(engine.spec) + prompt

    def _embed(self, texts: list[str], role: Role, *, show_progress: bool = False) -> list[list[float]]:
        return super()._embed(_in_one_line(texts), role, show_progress=show_progress)

    async def _aembed(self, texts: list[str], role: Role) -> list[list[float]]:
        return await super()._aembed(_in_one_line(texts), role)


def _in_one_line(texts: list[str]) -> list[str]:
    if not isinstance(texts, list | tuple):
        return texts  # the engine refuses it
    return [text.replace("\n", " ") if isinstance(text, str) else text for text in texts]
