"""The ColBERT retriever of LlamaIndex: nodes as they were added, filters, candidates, and a query engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import NodeRelationship, NodeWithScore, QueryBundle, RelatedNodeInfo, TextNode
from llama_index.core.vector_stores import FilterCondition, FilterOperator, MetadataFilter, MetadataFilters

from llama_index.retrievers.millpond import MillpondColBERTRetriever
from millpond import Engine
from millpond.errors import InvalidRequestError
from millpond.late_interaction import MemoryIndex

QUESTION = "what makes dough rise?"


@pytest.fixture(scope="module")
def nodes(texts: list[str]) -> list[TextNode]:
    return [
        TextNode(
            id_=f"node-{n}",
            text=text,
            metadata={"n": n, "parity": ("even", "odd")[n % 2]},
            excluded_embed_metadata_keys=["n", "parity"],
            relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id="book")},
            start_char_idx=n,
        )
        for n, text in enumerate(texts)
    ]


@pytest.fixture(scope="module")
def index(engine: Engine, nodes: list[TextNode]) -> MemoryIndex:
    index = MemoryIndex(engine)
    before = [node.model_copy(deep=True) for node in nodes]
    assert MillpondColBERTRetriever(index).add_nodes(nodes) == [node.node_id for node in nodes]
    assert nodes == before
    return index


def ids(found: list[NodeWithScore]) -> list[str]:
    return [hit.node.node_id for hit in found]


def test_nodes_come_back_as_they_were_added(index: MemoryIndex, nodes: list[TextNode]) -> None:
    found = MillpondColBERTRetriever(index=index, similarity_top_k=2).retrieve(QUESTION)
    assert len(found) == 2
    assert found[0].node == nodes[2]
    assert found[0].score == pytest.approx(index.search([QUESTION], k=1)[0][0].score, abs=0.01)


def test_a_document_without_a_node_comes_back_as_one(engine: Engine) -> None:
    index = MemoryIndex(engine)
    index.add(["a"], ["Bread rises."], [{"tags": ["x"]}])
    (found,) = MillpondColBERTRetriever(index).retrieve(QUESTION)
    assert (found.node.node_id, found.text, found.metadata) == ("a", "Bread rises.", {"tags": ["x"]})
    found.metadata["tags"].append("mine")
    assert index.search([QUESTION])[0][0].metadata == {"tags": ["x"]}


def test_the_index_reads_what_an_embedding_model_would(engine: Engine) -> None:
    index = MemoryIndex(engine)
    MillpondColBERTRetriever(index).add_nodes(
        [
            TextNode(
                id_="a",
                text="It has one moon.",
                metadata={"planet": "earth", "n": 1},
                excluded_embed_metadata_keys=["n"],
            )
        ]
    )
    assert index.search(["earth"])[0][0].text == "planet: earth\n\nIt has one moon."


def test_the_async_method_returns_the_same(index: MemoryIndex) -> None:
    retriever = MillpondColBERTRetriever(index, 3, sources=["index", lambda query, limit: ["node-3"]])
    found, expected = asyncio.run(retriever.aretrieve(QUESTION)), retriever.retrieve(QUESTION)
    assert [hit.node for hit in found] == [hit.node for hit in expected]
    assert [hit.score for hit in found] == pytest.approx([hit.score for hit in expected], abs=0.01)


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"n": 3}, {3}),
        ({"n": [3, 5], "parity": "odd"}, {3, 5}),
        (MetadataFilters(filters=[MetadataFilter(key="n", value=4)]), {4}),
        (
            MetadataFilters(
                filters=[
                    MetadataFilter(key="n", value=[4, 5], operator=FilterOperator.IN),
                    MetadataFilter(key="parity", value="even"),
                ]
            ),
            {4},
        ),
        ({"n": {"gt": 3, "lte": 6}, "parity": "even"}, {4, 6}),
        (
            MetadataFilters(
                filters=[
                    MetadataFilter(key="n", value=3, operator=FilterOperator.GT),
                    MetadataFilter(key="parity", value="odd"),
                    MetadataFilter(key="n", value=7, operator=FilterOperator.LTE),
                ]
            ),
            {5, 7},
        ),
    ],
    ids=["dict", "two keys", "equal", "in and equal", "range", "two ends"],
)
def test_filters(index: MemoryIndex, filters: Any, expected: set[int]) -> None:
    found = MillpondColBERTRetriever(index, 12, filters=filters).retrieve(QUESTION)
    assert {hit.metadata["n"] for hit in found} == expected


def test_filters_that_an_index_does_not_have_are_refused(index: MemoryIndex) -> None:
    above = MetadataFilter(key="n", value=3, operator=FilterOperator.GT)
    equal = MetadataFilter(key="n", value=3)
    for filters in (
        MetadataFilters(filters=[above, above]),
        MetadataFilters(filters=[above, equal]),
        MetadataFilters(filters=[equal, above]),
        MetadataFilters(filters=[MetadataFilter(key="n", value=3, operator=FilterOperator.NE)]),
        MetadataFilters(filters=[equal, MetadataFilter(key="parity", value="even")], condition=FilterCondition.OR),
        MetadataFilters(filters=[equal, equal]),
        MetadataFilters(filters=[MetadataFilters(filters=[equal])]),
        "n = 3",
    ):
        with pytest.raises(ValueError, match="filter"):
            MillpondColBERTRetriever(index, filters=filters)  # type: ignore[arg-type]


class Fixed(BaseRetriever):
    """Returns the nodes it was given."""

    def __init__(self, nodes: list[TextNode]) -> None:
        self._nodes = nodes
        super().__init__()

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=node, score=1.0) for node in self._nodes]


def test_candidates_come_from_another_retriever(index: MemoryIndex, nodes: list[TextNode]) -> None:
    retriever = MillpondColBERTRetriever(index, 2, sources=[Fixed([nodes[1], nodes[9], nodes[2]])])
    assert ids(retriever.retrieve(QUESTION))[0] == "node-2"
    assert ids(asyncio.run(retriever.aretrieve(QUESTION)))[0] == "node-2"
    assert set(ids(MillpondColBERTRetriever(index, 9, sources=[Fixed(nodes[4:6])]).retrieve(QUESTION))) == {
        "node-4",
        "node-5",
    }


def test_what_is_wrong_is_named(index: MemoryIndex) -> None:
    for options, message in (
        ({"index": "docs"}, "index is of type str; pass a MemoryIndex"),
        ({"k": 3}, "k=3 is not an option .* similarity_top_k= is the number"),
        ({"model": "a"}, r"model='a' is not an option .* MillpondColBERTRetriever\(MemoryIndex\(Engine"),
        ({"similarity_top_k": 0}, "k=0"),
        ({"sources": [3]}, "3 is not a source"),
    ):
        arguments: dict[str, Any] = {"index": index, **options}
        with pytest.raises((TypeError, InvalidRequestError), match=message):
            MillpondColBERTRetriever(**arguments).retrieve(QUESTION)
    retriever = MillpondColBERTRetriever(index)
    assert retriever.model == retriever.model_name == index.engine.spec.name


def test_spans_are_positions_in_the_text_of_the_node(engine: Engine) -> None:
    retriever = MillpondColBERTRetriever(MemoryIndex(engine), include_spans=True)
    retriever.add_nodes([TextNode(text="Bread rises because of yeast.", metadata={"title": "On the rising of dough"})])
    (hit,) = retriever.retrieve(QUESTION)
    spans = hit.node.metadata["spans"]
    inside = [span for span in spans if span["start"] is not None]
    assert 0 < len(inside) < len(spans)  # the title is read before the text
    assert {hit.node.get_content()[span["start"] : span["end"]] for span in inside} == {span["text"] for span in inside}
