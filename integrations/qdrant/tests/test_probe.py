"""When a probe is due, and what a search may leave out until then."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from qdrant_client import QdrantClient, models
from qdrant_client.http.models import QueryResponse

from millpond_qdrant.probe import PartialPoints

NAMES = ["d16", "d64", "d384"]


class Clock:
    """Seconds that a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def server() -> Iterator[QdrantClient]:
    client = QdrantClient("http://127.0.0.1:1", check_compatibility=False)  # nothing here sends it a request
    yield client
    client.close()


def answers(*found: bool) -> list[QueryResponse]:
    point = models.ScoredPoint(id=7, version=0, score=0)
    return [QueryResponse(points=[point] * one) for one in found]


def test_a_search_asks_about_the_smallest_and_the_largest_vector_at_first(server: QdrantClient) -> None:
    probe = PartialPoints().begin(server, "docs", NAMES)
    assert probe.lacked == {*NAMES} and probe.asked == ("d16", "d384")
    for request, name in zip(probe.requests, probe.asked, strict=True):
        assert request.model_dump(exclude_none=True) == {
            "filter": {"must_not": [{"has_vector": name}]},
            "limit": 1,
            "with_payload": False,
        }


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("large", [False, True])
def test_until_the_next_probe_only_what_no_point_lacked_is_left_out(
    server: QdrantClient, small: bool, large: bool
) -> None:
    partial = PartialPoints(clock=Clock())
    partial.end(partial.begin(server, "docs", NAMES), answers(small, large))
    after = partial.begin(server, "docs", NAMES)
    assert after.requests == []
    assert after.lacked == {"d64"} | ({"d16"} if small else set()) | ({"d384"} if large else set())
    # Another search's smallest vector was not asked about.
    assert "d64" in partial.begin(server, "docs", NAMES[1:]).lacked


@pytest.mark.parametrize(
    ("took", "pause"), [(0, 0.5), (0.001, 0.5), (0.005, 0.5), (0.25, 25), (0.5, 50), (0.75, 60), (50, 60)]
)
@pytest.mark.parametrize("found", [False, True])
def test_a_probe_is_due_after_a_hundred_times_its_search(
    server: QdrantClient, took: float, pause: float, found: bool
) -> None:
    clock = Clock()
    partial = PartialPoints(clock=clock)
    for _ in range(3):
        started = clock.now
        probe = partial.begin(server, "docs", NAMES)
        assert probe.asked and probe.lacked == {*NAMES}
        clock.now = started + took
        partial.end(probe, answers(found, found))
        clock.now = started + pause - 0.125
        assert not partial.begin(server, "docs", NAMES).asked
        clock.now = started + pause


def test_a_search_longer_than_the_longest_pause_leaves_nothing_out(server: QdrantClient) -> None:
    clock = Clock()
    partial = PartialPoints(clock=clock)
    probe = partial.begin(server, "docs", NAMES)
    clock.now += 61
    partial.end(probe, answers(False, False))
    assert partial.begin(server, "docs", NAMES).lacked == {*NAMES}


def test_a_probe_without_an_answer_is_asked_again(server: QdrantClient) -> None:
    partial = PartialPoints()
    first = partial.begin(server, "docs", NAMES)
    assert first.asked and partial.begin(server, "docs", NAMES).asked == first.asked
