"""The asynchronous client: the same vectors, and an event loop that goes on while they are computed."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from integrations.qdrant.tests.test_client import (
    NAMES,
    QUESTION,
    TEXTS,
    document,
    embedded,
    points,
    queries,
)
from qdrant_client import models
from tests.adapter_models import prompted as prompted

from millpond_qdrant import AsyncMillpondQdrantClient, MillpondQdrantClient

pytestmark = pytest.mark.contract

VECTORS = {"dense": models.VectorParams(size=384, distance=models.Distance.DOT)}


@pytest.mark.parametrize("write", ["upsert", "update_vectors", "batch_update_points"])
async def test_it_answers_as_the_other_client_does(prompted: str, write: str) -> None:
    client, other = AsyncMillpondQdrantClient(":memory:"), MillpondQdrantClient(":memory:")
    other.create_collection("docs", VECTORS)
    other.upsert("docs", points(prompted))
    await client.create_collection("docs", VECTORS)
    if write == "upsert":
        await client.upsert("docs", points(prompted))
    elif write == "update_vectors":
        await client.upsert("docs", [models.PointStruct(id=name, vector={"dense": [1.0] * 384}) for name in NAMES])
        await client.update_vectors("docs", [models.PointVectors(id=p.id, vector=p.vector) for p in points(prompted)])
    else:
        operation = models.UpsertOperation(upsert=models.PointsList(points=points(prompted)))
        await client.batch_update_points("docs", [operation])
    for arguments in queries(lambda text: document(text, prompted)).values():
        request = models.QueryRequest(**arguments, limit=5)
        found = [
            (await client.query_points("docs", **arguments, limit=5)).points,
            (await client.query_batch_points("docs", [request]))[0].points,
        ]
        wanted = other.query_points("docs", **arguments, limit=5).points
        for hits in found:
            assert [hit.id for hit in hits] == [hit.id for hit in wanted]
            assert [hit.score for hit in hits] == pytest.approx([hit.score for hit in wanted], abs=1e-6)
    groups = (
        await client.query_points_groups(
            "docs", "text", document(QUESTION, prompted), using="dense", limit=1, group_size=1
        )
        if write == "upsert"
        else None
    )
    if groups is not None:
        scores = embedded(prompted, TEXTS, "document") @ embedded(prompted, [QUESTION], "query")[0]
        assert groups.groups[0].hits[0].score == pytest.approx(scores.max(), abs=1e-5)
    assert client.get_embedding_size(prompted) == 384
    await client.close()
    other.close()


async def test_the_loop_goes_on(minilm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held until the loop says so: a call that keeps the loop waiting would wait for ever."""
    client = AsyncMillpondQdrantClient(":memory:")
    await client.create_collection("docs", VECTORS)
    begun, allowed, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()
    embed = client._local_models.embed

    def held(*args: Any, **kwargs: Any) -> list[Any]:
        loop.call_soon_threadsafe(begun.set)
        assert allowed.wait(10), "the event loop is blocked"
        return embed(*args, **kwargs)

    monkeypatch.setattr(client._local_models, "embed", held)
    calls: list[Any] = [
        client.upsert("docs", points(minilm)),
        client.query_points("docs", document(QUESTION, minilm), using="dense"),
        client.query_points(
            "docs",
            prefetch=models.Prefetch(query=document(QUESTION, minilm), using="dense"),
            query=models.FusionQuery(fusion=models.Fusion.RRF),
        ),
        client.query_batch_points("docs", [models.QueryRequest(query=document(QUESTION, minilm), using="dense")]),
        client.update_vectors("docs", [models.PointVectors(id=NAMES[0], vector={"dense": document("x", minilm)})]),
    ]
    for call in calls:
        begun.clear()
        allowed.clear()
        task = asyncio.ensure_future(call)
        await begun.wait()
        allowed.set()
        await task
    await client.close()
