"""Score templates: Jinja templates of the text that an LLM reranker reads.

A template gets ``messages`` with the roles ``query`` and ``document`` (and ``system``, if there is an instruction), the
variables ``instruction`` and ``add_generation_prompt``, and the special tokens by role (``bos_token`` and so on).
Templates of vLLM and sentence-transformers expect these, so both work unchanged. It is rendered in a sandbox, as
transformers renders chat templates; Jinja drops one newline at the end of a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millpond.checkpoints.templates.sandbox import sandbox
from millpond.errors import InputTooLongError, InvalidRequestError
from millpond.support.cached_property import cached_property

if TYPE_CHECKING:
    from jinja2 import Template

_SHIPPED = Path(__file__).parent
_SUFFIXES = (".jinja", ".jinja2", ".j2")
# Between two parts of a text that are tokenized apart.
BREAK = "\ue0f5"
# Private-use characters, which no text or template contains and which no folding or trimming changes.
_MARK = "\ue0f1\ue0f2"
_ROLES = ("query", "document")
_EXAMPLE = (
    "<Query>: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n"
    "<Document>: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}"
)


@dataclass(frozen=True, kw_only=True)
class Longest:
    """Where the parts of a text are cut that has two."""

    document: int  # most tokens of the first part, which has the document
    query: int  # most tokens of the query in the second


@dataclass(frozen=True, kw_only=True)
class ScoreTemplate:
    """How a query and a document become one text."""

    source: str  # the Jinja source
    name: str = "score_template"  # its name in errors
    # Whether the tokenizer adds its special tokens around the text, as in vLLM; a chat template, as sentence-
    # transformers applies it, contains all of them
    special_tokens: bool = True
    instruction: str | None = None  # the instruction of a request that has none
    variables: Mapping[str, Any] = field(default_factory=dict)  # further variables of the template
    longest: Longest | None = None  # of a text of two parts

    def bound(self, variables: Mapping[str, Any]) -> ScoreTemplate:
        """This template with more variables; its own have precedence."""
        return replace(self, variables={**variables, **self.variables})

    def check(self) -> None:
        """Refuse a template that leaves the query or the document out."""
        if (failure := self.failure) is not None:
            raise InvalidRequestError(
                f"the template {self.name} {failure}; it must render messages of both roles, for example\n{_EXAMPLE}"
            )

    @cached_property
    def failure(self) -> str | None:
        """Why this is no score template; ``None`` if it is one."""
        try:
            text = self.render(*_marks("", ""))
        except InvalidRequestError as error:
            return f"cannot be rendered: {error.__cause__ or error}"
        missing = [role for role, mark in zip(_ROLES, _marks("", ""), strict=True) if mark not in text]
        return f"has no slot for the {' and the '.join(missing)}" if missing else None

    @property
    def names_roles(self) -> bool:
        """Whether it renders both roles and ignores unknown roles, as a chat template for pairs does."""
        if self.failure is not None:
            return False
        strangers = _messages({f"unknown_{role}": _MARK for role in _ROLES}, self._structured)
        try:
            return _MARK not in self._render(strangers, None)
        except InvalidRequestError:
            return True

    @cached_property
    def takes_instruction(self) -> bool:
        """Whether an instruction changes the text."""
        return _MARK * 3 in self.render("q", "d", instruction=_MARK * 3)

    def render(self, query: str, document: str, *, instruction: str | None = None) -> str:
        """The text for one pair."""
        instruction = self.instruction if instruction is None else instruction
        system = {} if instruction is None else {"system": instruction}
        return self._render(_messages({**system, "query": query, "document": document}, self._structured), instruction)

    def render_list(self, query: str, documents: Sequence[str], *, instruction: str | None = None) -> str:
        """The text for a query and all of its documents."""
        messages = [*_messages({"query": query}, self._structured)]
        for document in documents:
            messages += _messages({"document": document}, self._structured)
        return self._render(messages, instruction)

    def around(
        self, query: str, document: str, text: str, *, instruction: str | None = None
    ) -> tuple[tuple[str, str], tuple[str, str]]:
        """((before, after) the query, (before, after) the document) in the ``text`` of a pair.

        A template may trim or change its inputs, so they are not searched for in the text; each is located by rendering
        a mark in its place. A query that appears several times counts as part of the template.
        """
        marks = _marks(query, document)
        around_query = self.render(marks[0], document, instruction=instruction).split(marks[0])
        around_document = self.render(query, marks[1], instruction=instruction).split(marks[1])
        if not _fits(around_document, text):
            raise InputTooLongError(
                f"the template {self.name} renders the document in more than one place, or by its content, so an "
                "over-long one cannot be cut; shorten it"
            )
        before, after = around_query if _fits(around_query, text) else (text, "")
        return (before, after), (around_document[0], around_document[1])

    def _render(self, messages: list[dict[str, Any]], instruction: str | None) -> str:
        from jinja2 import TemplateError

        variables = {"add_generation_prompt": False, **self.variables}
        if instruction is not None:
            variables["instruction"] = instruction
        try:
            return str(self._compiled.render(messages=messages, **variables))
        except (TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
            raise InvalidRequestError(f"the template {self.name} raised {type(error).__name__}: {error}") from error

    @cached_property
    def _compiled(self) -> Template:
        from jinja2 import TemplateError

        try:
            template: Template = sandbox().from_string(self.source)
        except TemplateError as error:
            raise InvalidRequestError(f"the template {self.name} is no Jinja: {error}") from error
        return template

    @cached_property
    def _structured(self) -> bool:
        """Whether it reads a message's content as a list of parts instead of a text."""
        query, document = _marks("", "")
        for structured in (False, True):
            messages = _messages(dict(zip(_ROLES, (query, document), strict=True)), structured)
            try:
                text = self._render(messages, None)
            except InvalidRequestError:
                continue
            # A list that is printed unchanged puts quotes around the text.
            if query in text and document in text and f"'{query}'" not in text:
                return structured
        return False


def read_template(value: str) -> ScoreTemplate:
    """The user's template: the path of a ``.jinja`` file, or Jinja source; not checked yet."""
    path = Path(value) if value.endswith(_SUFFIXES) and "\n" not in value and "{" not in value else None
    if path is None:
        return ScoreTemplate(source=value)
    try:
        return ScoreTemplate(source=path.expanduser().read_text(encoding="utf-8"), name=path.name)
    except (OSError, UnicodeError) as error:
        raise InvalidRequestError(
            f"score_template={value!r} cannot be read ({error}); pass the path of a Jinja file, or its source"
        ) from error


def shipped_template(name: str, *, special_tokens: bool) -> ScoreTemplate:
    """A template that comes with millpond, by the name of its file."""
    source = (_SHIPPED / f"{name}.jinja").read_text(encoding="utf-8")
    return ScoreTemplate(source=source, name=name, special_tokens=special_tokens)


def _messages(texts: Mapping[str, str], structured: bool) -> list[dict[str, Any]]:
    """A message of each role."""
    return [
        {"role": role, "content": [{"type": "text", "text": text}] if structured else text}
        for role, text in texts.items()
    ]


def _marks(query: str, document: str) -> tuple[str, str]:
    """A mark for each role that neither text contains."""
    mark = _MARK
    while mark in query or mark in document:
        mark += _MARK
    return f"{mark}\ue0f3", f"{mark}\ue0f4"


def _fits(parts: list[str], text: str) -> bool:
    """Whether ``text`` is the two ``parts`` with something between them."""
    if len(parts) != 2 or len(text) < len(parts[0]) + len(parts[1]):
        return False
    return text.startswith(parts[0]) and text.endswith(parts[1])
