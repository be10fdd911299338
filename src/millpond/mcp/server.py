"""The server of the protocol: tools over a :class:`SearchService`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations
from pydantic import Field

from millpond.errors import MillpondError
from millpond.mcp.results import Added, Deleted, Document, Explanation, Hits, Match, TargetFacts, Text, fit
from millpond.mcp.service import SearchService

_READS = ToolAnnotations(read_only_hint=True, idempotent_hint=True, open_world_hint=False)
_WRITES = ToolAnnotations(read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False)
# An agent never waits for more: what it may ask for at once.
_MOST_DOCUMENTS = 1000

Query = Annotated[str, Field(description="What is looked for, in words or as code")]
Id = Annotated[str, Field(description="The id of a hit")]
Filter = Annotated[
    dict[str, Any] | None,
    Field(
        description='Metadata that must match: {"key": value}, {"key": [one, of, these]} or {"key": {"gte": 1}}; in a '
        'folder of files as {"folder": "src/app", "kind": "function", "language": "python"}'
    ),
]
TargetName = Annotated[str | None, Field(description="The name of one target; needed only if there are several")]


def create_server(service: SearchService, *, budget: int, writable: bool, log_level: str = "WARNING") -> MCPServer[Any]:
    """The server.

    Args:
        service: The targets.
        budget: Most characters of an answer's texts and metadata.
        writable: Whether there are tools that change targets.
        log_level: Lowest level of the log of the protocol.
    """
    from millpond import __version__

    level: Any = log_level.upper()
    server: MCPServer[Any] = MCPServer(
        "millpond", title="millpond search", version=__version__, instructions=_instructions(service), log_level=level
    )
    reads: list[Callable[..., Any]] = [_search(service, budget), _get(service, budget), _explain(service)]
    writes: list[Callable[..., Any]] = [_add(service), _delete(service)] if writable else []
    for tool in (*reads, *writes):
        server.add_tool(tool, annotations=_READS if tool in reads else _WRITES, structured_output=True)
    return server


def _instructions(service: SearchService) -> str:
    lines = [f"- {target.name}: {target.description}" for target in service.targets]
    return "\n".join(["Search by meaning and by words, in:", *lines, "Read more of a hit with get."])


@contextmanager
def _mistakes() -> Iterator[None]:
    """What millpond refuses is an answer of the tool, and no crash of it."""
    try:
        yield
    except MillpondError as error:
        raise ToolError(str(error)) from None


def _search(service: SearchService, budget: int) -> Callable[..., Hits]:
    def search(
        query: Query,
        top_k: Annotated[int, Field(description="Most hits")] = 10,
        filter: Filter = None,
        target: TargetName = None,
    ) -> Hits:
        """Find the texts that answer a question best: functions, classes, sections or records, with where they are."""
        with _mistakes():
            found = service.search(query, top_k, filter, target)
            chosen = [each for each in service.targets if target in (None, each.name)]
            searched = [TargetFacts(target=each.name, facts=each.facts()) for each in chosen]
        return Hits(hits=fit(found, budget), searched=searched)

    return search


def _get(service: SearchService, budget: int) -> Callable[..., Text]:
    def get(id: Id) -> Text:
        """The whole text of a hit."""
        with _mistakes():
            found = service.get(id)
        (hit,) = fit([found], budget)
        return Text(id=hit.id, text=hit.text, truncated=hit.truncated, metadata=hit.metadata)

    return get


def _explain(service: SearchService) -> Callable[..., Explanation]:
    def explain(query: Query, id: Id) -> Explanation:
        """Why a text matches a query: where each token of the query finds its best match in the text."""
        with _mistakes():
            matches = service.explain(query, id)
        rows = [
            Match(token=each.token, score=round(each.score, 6), start=each.start, end=each.end, text=each.text)
            for each in matches
        ]
        return Explanation(id=id, score=round(sum(each.score for each in matches), 6), matches=rows)

    return explain


def _add(service: SearchService) -> Callable[..., Added]:
    def add(
        documents: Annotated[list[Document], Field(min_length=1, max_length=_MOST_DOCUMENTS)], target: TargetName = None
    ) -> Added:
        """Store texts, which searches then find; a text whose id is known replaces the one that was there."""
        with _mistakes():
            name, stored = service.add(
                target,
                [each.id for each in documents],
                [each.text for each in documents],
                [each.metadata for each in documents],
            )
        return Added(target=name, stored=stored)

    return add


def _delete(service: SearchService) -> Callable[..., Deleted]:
    def delete(
        ids: Annotated[list[str], Field(min_length=1, max_length=_MOST_DOCUMENTS)], target: TargetName = None
    ) -> Deleted:
        """Delete texts by their ids; those that are not there are ignored."""
        with _mistakes():
            name = service.delete(target, ids)
        return Deleted(target=name, ids=ids)

    return delete
