"""Which vectors every point of a collection has, asked of a server in the same request as a search, now and then.

To look for points that lack a vector costs a server some 12 ns per point and vector, of which it has millions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from qdrant_client import QdrantClient, models
from qdrant_client.http.models import QueryResponse

from millpond_qdrant.local import lacked

# A probe is due again after 100 times the duration of the search that it was part of: some 1 % of the time is theirs.
_PACE = 100
_SHORTEST, _LONGEST = 0.5, 60.0  # s


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a probe found."""

    whole: frozenset[str] = frozenset()  # names of the vectors that no point lacked
    due: float = -math.inf  # when the next probe is, on the clock's seconds


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A search's part in probing."""

    lacked: frozenset[str]  # names of the vectors that some points may lack
    asked: tuple[str, ...] = ()  # those that this search asks about: none until a probe is due
    started: float = 0.0  # when the search began, on the clock's seconds

    @property
    def requests(self) -> list[models.QueryRequest]:
        """One request per name in ``asked``, for any point that lacks that vector, whatever the search's filter."""
        return [
            models.QueryRequest(  # without a query: a scroll
                filter=models.Filter(must_not=[models.HasVectorCondition(has_vector=name)]), limit=1, with_payload=False
            )
            for name in self.asked
        ]


class PartialPoints:
    """What the searches of one sink know about points that lack vectors.

    Nothing is known at first, so the first search asks. Threads share one frozen :class:`Finding`, replaced as a whole:
    searches that begin before the first probe's answer ask too.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._finding = Finding()

    def begin(self, client: QdrantClient, collection: str, names: Sequence[str]) -> Probe:
        """What a search by these vectors, smallest first, may leave out, and what it has to ask."""
        local = lacked(client, collection, names)
        if local is not None:
            return Probe(lacked=local)
        started, finding = self._clock(), self._finding
        if len(names) == 1 or started < finding.due:
            return Probe(lacked=frozenset(names) - finding.whole)
        return Probe(lacked=frozenset(names), asked=(names[0], names[-1]), started=started)

    def end(self, probe: Probe, answers: Sequence[QueryResponse]) -> None:
        """Take the answers to ``probe.requests``."""
        if probe.asked:
            whole = {name for name, answer in zip(probe.asked, answers, strict=True) if not answer.points}
            pause = min(max(_PACE * (self._clock() - probe.started), _SHORTEST), _LONGEST)
            self._finding = Finding(whole=frozenset(whole), due=probe.started + pause)
