"""DSPy as installed: dspy.Embedder with its cache and its users, and a retriever over an index and a collection."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import dspy
import numpy as np
import pytest
from dspy.utils.dummies import DummyLM
from tests.adapters import write_prompted
from tests.gates import LoopGate, batches_through

from millpond import Engine
from millpond.compat.dspy import MillpondEmbedder, MillpondRetriever
from millpond.errors import InvalidRequestError, SourceNotFoundError
from millpond.ingest import Record, ingest, open_sink
from millpond.late_interaction import PlaidIndex
from millpond.search.stages import StagePlan

pytestmark = pytest.mark.door

TEXTS = ["Tides follow the moon.", "Bread rises because of yeast.", "The heart pumps blood.", "Glaciers carve valleys."]
QUESTION = "What makes dough rise?"


@pytest.fixture(scope="module")
def engine(minilm: str) -> Iterator[Engine]:
    with Engine(minilm, dtype="float32") as engine:
        yield engine


@pytest.fixture
def prompted(minilm: str, tmp_path: Path) -> str:
    """MiniLM with a prompt for each role."""
    return str(write_prompted(tmp_path / "prompted", minilm))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[Any]:
    """A cache of DSPy's own for each test."""
    before = dspy.cache
    dspy.configure_cache(enable_disk_cache=True, enable_memory_cache=True, disk_cache_dir=str(tmp_path / "dspy"))
    yield dspy.cache
    dspy.cache = before


def same(rows: Any, expected: Any) -> None:
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows, expected, atol=1e-5)


def test_the_vectors_are_the_engines(minilm: str, engine: Engine) -> None:
    embedder = MillpondEmbedder(minilm, dtype="float32")
    assert isinstance(embedder, dspy.Embedder)
    expected = engine.embed(TEXTS, role="document").embeddings
    same(embedder(TEXTS), expected)
    same(embedder(TEXTS, batch_size=3), expected)
    same(embedder(TEXTS[1]), expected[1])
    same(MillpondEmbedder(engine=engine, dimensions=None)(TEXTS), expected)
    with pytest.raises(ValueError, match="must be strings"):
        embedder([1])


def test_a_role_has_its_prompt(prompted: str) -> None:
    documents = MillpondEmbedder(prompted, dtype="float32", caching=True)
    queries = MillpondEmbedder(prompted, dtype="float32", caching=True, role="query")
    with Engine(prompted, dtype="float32") as engine:
        as_query, as_document = (engine.embed([QUESTION], role=role).embeddings for role in ("query", "document"))
    assert abs(as_query - as_document).max() > 1e-2
    same(documents([QUESTION]), as_document)
    same(documents([QUESTION], role="query"), as_query)
    same(queries([QUESTION]), as_query)
    assert documents.model.load() is queries.model.load()


async def test_the_event_loop_goes_on_where_dspys_own_method_blocks_it(engine: Engine) -> None:
    expected = engine.embed(TEXTS).embeddings

    async def blocked(embedder: Any, seconds: float) -> bool:
        gate = LoopGate(seconds)
        with batches_through(gate, engine):
            same(await gate.run(embedder.acall(TEXTS)), expected)
        return gate.blocked

    assert not await blocked(MillpondEmbedder(engine=engine), 60)
    assert await blocked(dspy.Embedder(lambda texts: engine.embed(texts).embeddings, caching=False), 0.2)


def test_dspys_cache_tells_models_apart(minilm: str, prompted: str, engine: Engine) -> None:
    def computed(embedder: Any) -> int:
        return embedder.model.load().stats().texts_done

    one, other = (MillpondEmbedder(model, dtype="float32", caching=True) for model in (minilm, prompted))
    first, second = one(TEXTS), other(TEXTS)
    assert abs(first - second).max() > 1e-2
    before = computed(one)
    same(one(TEXTS), first)
    same(MillpondEmbedder(minilm, dtype="float32", caching=True)(TEXTS), first)
    assert computed(one) == before
    short = MillpondEmbedder(minilm, dtype="float32", caching=True, pooling="cls")
    assert abs(short(TEXTS) - first).max() > 1e-2

    # With functions of equal source, the second model is given the vectors of the first.
    def function(loaded: Engine) -> Any:
        return lambda texts: loaded.embed(texts, role="document").embeddings

    loaded = [embedder.model.load() for embedder in (one, other)]
    wrong = [dspy.Embedder(function(each))(TEXTS) for each in loaded]
    np.testing.assert_array_equal(*wrong)
    with pytest.raises(TypeError, match="cannot be pickled"):  # DSPy copies what it calls
        dspy.Embedder(engine.embed)(TEXTS)


def test_an_engine_given_is_told_apart_too(minilm: str, engine: Engine) -> None:
    with Engine(minilm, dtype="float32", max_length=4) as short:
        vectors = [MillpondEmbedder(engine=each, caching=True)(["tides " * 20]) for each in (engine, short)]
    assert abs(vectors[0] - vectors[1]).max() > 1e-3


def test_dspys_own_retrievers_take_it(prompted: str, tmp_path: Path) -> None:
    documents, queries = (MillpondEmbedder(prompted, dtype="float32", role=role) for role in ("document", "query"))
    search = dspy.retrievers.Embeddings(TEXTS, documents, k=2)
    search.save(str(tmp_path / "saved"))
    search = dspy.retrievers.Embeddings.from_saved(str(tmp_path / "saved"), queries)
    assert search(QUESTION).indices[0] == 1
    examples = [dspy.Example(question=text, answer=text).with_inputs("question") for text in TEXTS]
    (nearest,) = dspy.KNN(1, examples, documents)(question=QUESTION)
    assert nearest.answer == TEXTS[1]


@pytest.fixture(scope="module")
def places(minilm: str, engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The same texts in a late-interaction index, in a collection and in a folder of files."""
    folder = tmp_path_factory.mktemp("places")
    metadata = [{"number": number} for number in range(len(TEXTS))]
    ids = [f"t{number}" for number in range(len(TEXTS))]
    with PlaidIndex(folder / "index", engine) as index:
        index.add(ids, TEXTS, metadata)
    url = f"qdrant+path:{folder / 'qdrant'}#docs"
    sink = open_sink(url)
    records = [Record(id, text, own) for id, text, own in zip(ids, TEXTS, metadata, strict=True)]
    ingest(records, engine=engine, sink=sink, show_progress=False)
    sink.close()
    for id, text in zip(ids, TEXTS, strict=True):
        (folder / "files").mkdir(exist_ok=True)
        (folder / "files" / f"{id}.txt").write_text(text)
    return {"index": str(folder / "index"), "collection": url, "files": str(folder / "files")}


@pytest.fixture(params=["index", "collection", "files"])
def retriever(
    request: pytest.FixtureRequest, places: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[MillpondRetriever]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    retriever = MillpondRetriever(places[request.param], k=2, dtype="float32")
    yield retriever
    retriever.close()


async def test_it_finds_what_the_place_has(retriever: MillpondRetriever) -> None:
    found = retriever(QUESTION)
    assert isinstance(found, dspy.Prediction)
    assert found.passages[0] == TEXTS[1] and "t1" in found.ids[0]
    assert len(found.passages) == len(found.ids) == len(found.scores) == len(found.metadata) == 2
    assert found.scores[0] > found.scores[1]
    assert retriever(QUESTION, k=1).passages == found.passages[:1]
    assert (await retriever.acall(query=QUESTION)).passages == found.passages
    with pytest.raises(InvalidRequestError, match="query is blank"):
        retriever(" ")


@pytest.mark.parametrize("place", ["index", "collection"])
def test_filters_stages_and_a_place_that_is_not_there(places: dict[str, str], place: str) -> None:
    retriever = MillpondRetriever(places[place], filter={"number": {"gte": 2}}, plan=StagePlan(rerank="self"))
    found = retriever(QUESTION)
    assert sorted(each["number"] for each in found.metadata) == [2, 3]
    assert retriever(QUESTION, filter={"number": 0}).passages == [TEXTS[0]]
    retriever.close()
    with pytest.raises(SourceNotFoundError, match="neither a folder nor the URL"):
        MillpondRetriever("./no-such-folder")(QUESTION)


def test_copies_share_the_index_and_another_process_opens_its_own(places: dict[str, str]) -> None:
    retriever = MillpondRetriever(places["index"], k=1)
    first = retriever(QUESTION).passages
    for again in (copy.deepcopy(retriever), retriever.deepcopy(), retriever.reset_copy()):
        assert again._place is retriever._place and again(QUESTION).passages == first
    again = cloudpickle.loads(cloudpickle.dumps(retriever))
    assert again._place is not retriever._place and again(QUESTION).passages == first
    retriever.close()
    assert retriever(QUESTION).passages == first


class Answers(dspy.Module):
    """Retrieval, then an answer."""

    def __init__(self, retriever: MillpondRetriever) -> None:
        super().__init__()
        self.retriever = retriever
        self.answer = dspy.Predict("context, question -> answer")

    def forward(self, question: str) -> dspy.Prediction:
        return self.answer(context=self.retriever(question).passages, question=question)


def test_a_program_is_evaluated_in_threads_and_saved(places: dict[str, str], tmp_path: Path) -> None:
    program = Answers(MillpondRetriever(places["collection"], k=1))
    examples = [dspy.Example(question=text, answer="yes").with_inputs("question") for text in TEXTS]
    prompts = []

    class Recording(DummyLM):
        def forward(self, *arguments: Any, **options: Any) -> Any:
            prompts.append(str(options.get("messages")))
            return super().forward(*arguments, **options)

    with dspy.context(lm=Recording([{"answer": "yes"}] * 20)):
        score = dspy.Evaluate(devset=examples, metric=lambda gold, found: gold.answer == found.answer, num_threads=4)
        assert score(program).score == 100
    assert all(any(text in prompt for prompt in prompts) for text in TEXTS)
    program.save(tmp_path / "program.json")
    Answers(MillpondRetriever(places["index"])).load(tmp_path / "program.json")


def test_it_is_a_tool_of_an_agent(places: dict[str, str]) -> None:
    retriever = MillpondRetriever(places["index"], k=1)
    tool = dspy.Tool(retriever.forward, name="search")
    assert tool.args["query"] == {"type": "string"}
    assert tool(query=QUESTION).passages == [TEXTS[1]]
    dspy.ReAct("question -> answer", tools=[tool])
