"""Migration: one collection and the one that is to take its place."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from millpond.errors import InvalidRequestError, MillpondError, SinkError
from millpond.ingest.chunking import Chunker
from millpond.ingest.pipeline.delivery import RetryingWriter
from millpond.ingest.sinks.bridge_rows import FORM, bridge_rows
from millpond.ingest.sinks.collection import CollectionSink
from millpond.ingest.sinks.succession import Succession, bridge_name
from millpond.migrate.bridge import LEAST_RECALL, LEAST_ROWS, fit_bridge
from millpond.migrate.change import Change
from millpond.migrate.outcome import Outcome
from millpond.migrate.row_copy import CopyOptions, Pass, RowCopy
from millpond.migrate.verify import verify_sample

if TYPE_CHECKING:
    from millpond.engine.engine import Engine

logger = logging.getLogger(__name__)

_PASSES = 20
# Rows of a pass that are so few that the next one is the last.
_QUIET_ROWS, _QUIET_SHARE = 256, 0.001
# Seconds for which writers wait at the least, and how many times as long as the last pass took.
_SEALED, _SEALED_PASSES = 30.0, 4.0
_SEALS = 8
# Row ids that are asked for or deleted in one request, and that are held in memory while a collection is emptied.
_PAGE, _DROPPED = 1024, 1 << 16
# Seconds that requests take which began before writers were held back.
IN_FLIGHT = 1.0
# Seconds after a cut-over until every reader has read the manifest again: twice what a sink trusts it.
SETTLED = 120.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Filling:
    """A migration that has begun.

    Attributes:
        state: What the metadata says of it.
        copy: Copies the rows of the old collection to the new one.
    """

    state: Succession
    copy: RowCopy


class Migration:
    """Fills a collection beside the one that serves, and lets it answer by the same name.

    Args:
        head: The sink of the collection, by the name that readers and writers use.
        change: What the new collection has; ``None`` to go on with what the collection says, without embedding.
        options: How rows are copied.

    Attributes:
        least_recall: The least expected recall of a bridge.
    """

    least_recall = LEAST_RECALL

    def __init__(
        self, head: CollectionSink[Any], change: Change | None = None, *, options: CopyOptions | None = None
    ) -> None:
        self.head, self.change = head, change
        self.options = options or CopyOptions()
        self._start = time.monotonic()
        self._passes: list[Pass] = []

    def succession(self) -> Succession | None:
        """Which collections answer by the name, as it is stored now."""
        return self.head.succession()

    def old_name(self) -> str:
        """The collection that serves now."""
        found = self.succession()
        return self.head.collection if found is None else found.serving

    def check(self) -> str:
        """Raise InvalidRequestError unless the migration can be begun, or goes on; returns the new collection's name.

        Raises:
            InvalidRequestError: Another one is not finished, there is nothing to change, or the chunks cannot be cut.
        """
        assert self.change is not None
        found = self.succession()
        self._check_name()
        serving = self.head.named(self.old_name()).own()
        if found is not None and found.phase == "live" and self._is_same(found.serving):
            return found.serving
        if found is not None and found.phase == "live":
            raise InvalidRequestError(
                f"collection {self.head.collection!r} was migrated to {serving.model} ({found.serving!r}), and "
                f"{found.other!r} is still there; drop it by millpond migrate finish, or go back by millpond migrate "
                "rollback"
            )
        self.change.check(serving)
        name = self.change.name(self.head.collection, serving, self.head.check_name)
        if found is not None and found.phase != "finished" and found.other != name:
            raise InvalidRequestError(
                f"collection {self.head.collection!r} is being migrated to {found.other!r}, by another model or other "
                "settings; go on with these, or give it up by millpond migrate rollback and millpond migrate finish"
            )
        return name

    def run(self, engine: Engine, *, sparse_engine: Engine | None = None, bridge: bool = False) -> Outcome:
        """Fill the new collection, keep it in step until it is, verify it, and cut over.

        Args:
            engine: The engine of the new model.
            sparse_engine: The engine of its sparse vectors; ``None`` for ``engine``.
            bridge: Fit a bridge first, so that questions of the new model find the old vectors, too.

        Returns:
            What was done. If records failed, or it was stopped, nothing was cut over.

        Raises:
            InvalidRequestError: As :meth:`check`, or the bridge would find too little.
            SinkError: The database refuses or does not answer, or the new collection is not as it should be.
        """
        filling = self.begin(engine, sparse_engine=sparse_engine, bridge=bridge)
        if filling is None:
            self._move_aliases()  # a run that was killed after the cut-over may not have
            return self._outcome()
        former = filling.copy.source.own().fingerprint
        return self._advance(filling.state, filling.copy, engine, former=former)

    def begin(self, engine: Engine, *, sparse_engine: Engine | None = None, bridge: bool = False) -> Filling | None:
        """Create the new collection, say so in the metadata, and fit the bridge.

        Args:
            engine: The engine of the new model.
            sparse_engine: The engine of its sparse vectors; ``None`` for ``engine``.
            bridge: Fit a bridge, unless there is one.

        Returns:
            What fills the new collection; ``None`` if it has cut over before.

        Raises:
            InvalidRequestError: As :meth:`check`, or the bridge would find too little.
        """
        assert self.change is not None
        name = self.check()
        found = self.succession()
        if found is not None and found.phase == "live":
            return None
        old = self.head.named(self.old_name())
        if bridge:
            self._check_bridged(old)
        new = self._writer(name, self.change.options)
        new.create(self.change.manifest(old.own()))
        chunking = self.change.chunking
        copy = RowCopy(
            old,
            new,
            engine=engine,
            sparse_engine=sparse_engine,
            options=self.options,
            records=self.change.records,
            chunker=None if chunking is None else Chunker.for_engine(engine, chunking),
        )
        again = found is not None and found.other == name
        state = Succession(
            serving=self.old_name(),
            other=name,
            since=time.time(),
            rows=new.count(),
            recall=found.recall if again and found is not None else None,
            former=found.former if again and found is not None else "",
            rechunks=self.change.rechunks,
        )
        self._note(state)
        if bridge and state.recall is None:
            state = self._bridged(state, copy, engine)
        return Filling(state=state, copy=copy)

    def rollback(self, engine: Engine | None, *, sparse_engine: Engine | None = None) -> Outcome:
        """Let the old collection serve again, with the rows that were written since; the new one stays.

        Before the cut-over, give the migration up: the new collection is kept, too.

        Args:
            engine: The engine of the old model, which embeds what was written to the new collection since the
                cut-over; ``None`` leaves it out.
            sparse_engine: The engine of the old sparse vectors; ``None`` for ``engine``.

        Returns:
            What was done.

        Raises:
            InvalidRequestError: There is no migration to go back from, or its chunks were cut anew.
        """
        found = self.succession()
        if found is None or not found.other or found.phase == "finished":
            raise InvalidRequestError(f"collection {self.head.collection!r} has no former collection to go back to")
        if found.phase != "live":
            self._note(replace(found, phase="rolled back", since=time.time(), until=0.0))
            return self._outcome()
        back = Succession(
            serving=found.other,
            other=found.serving,
            phase="rolled back",
            since=time.time(),
            recall=found.recall,
            former=found.former,
            rechunks=found.rechunks,
        )
        if engine is None:
            self._note(back)
            self._move_aliases()
            return self._outcome()
        if found.rechunks:
            raise InvalidRequestError(
                "the chunks of the new collection are not those of the old one, so what was written since cannot be "
                "taken back; roll back with --no-mirror, and ingest again what was written since"
            )
        old, new = self._writer(found.other, {}), self.head.named(found.serving)
        old.own().check_model(engine.spec, collection=found.other)
        copy = RowCopy(new, old, engine=engine, sparse_engine=sparse_engine, options=self.options)
        return self._advance(found, copy, engine, then=back)

    def finish(self) -> Outcome:
        """Drop the collection that does not serve. The name goes on: an empty collection points to the one that serves.

        Returns:
            What was done.

        Raises:
            InvalidRequestError: Nothing is to be dropped, the migration has not cut over, or readers may still search
                the old collection.
        """
        found = self.succession()
        if found is None or not found.other:
            raise InvalidRequestError(f"collection {self.head.collection!r} has nothing to finish")
        if found.phase in ("filling", "sealed"):
            raise InvalidRequestError(
                "the migration has not cut over; go on with millpond migrate run, or give it up with millpond migrate "
                "rollback first"
            )
        if found.phase == "live" and (left := found.since + SETTLED - time.time()) > 0:
            raise InvalidRequestError(
                f"the cut-over was less than {SETTLED:.0f} s ago, and readers that follow it may still search the old "
                f"collection; finish in {left:.0f} s"
            )
        keeps = found.phase == "live"
        done = replace(
            found,
            phase="finished",
            since=time.time(),
            recall=found.recall if keeps and found.former else None,
            former=found.former if keeps else "",
        )
        self._note(done)  # before the rows go: no search finds a half of them
        self._drop(found.other)
        if done.recall is None and found.recall is not None:
            self._drop(bridge_name(found.new))
        done = replace(done, other="")
        self._note(None if done.serving == self.head.collection else done)
        return self._outcome()

    def lacking(self) -> int:
        """How many rows of the collection that does not serve the serving one lacks; finish drops them."""
        found = self.succession()
        if found is None or not found.other:
            return 0
        other, serving = self.head.named(found.other), self.head.named(found.serving)
        count, rows = 0, other.scan()
        while part := [row_id for row_id, _ in islice(rows, _PAGE)]:
            count += len(set(part) - serving.fetch(part).keys())
        return count

    # ------------------------------------------------------------------------------------------------------------

    def _advance(
        self,
        state: Succession,
        copy: RowCopy,
        engine: Engine,
        *,
        former: str = "",
        then: Succession | None = None,
    ) -> Outcome:
        """Pass over the rows until a pass changes few, hold writers back, pass until it changes none, and swap."""
        for _ in range(_PASSES):
            done = self._pass(copy)
            if done is None:
                return self._outcome(stopped=True)
            if done.failed:
                return self._outcome()
            if done.changed <= max(_QUIET_ROWS, _QUIET_SHARE * done.read):
                break
        verify_sample(copy, engine)
        for _ in range(_SEALS):
            seconds = max(_SEALED, _SEALED_PASSES * self._passes[-1].seconds)
            sealed = replace(state, phase="sealed", since=time.time(), until=time.time() + seconds)
            self._note(sealed)
            self.options.stop.wait(IN_FLIGHT)
            try:
                done = self._pass(copy)
            except BaseException:
                with suppress(SinkError):
                    self._note(state)
                raise
            if done is None or done.failed:
                self._note(state)
                return self._outcome(stopped=done is None)
            if not done.changed and sealed.wait:
                break
        else:
            self._note(state)
            raise SinkError(
                f"after {len(self._passes)} passes rows of {copy.source.collection!r} still differ from those that "
                "were written; a program writes there that does not follow collections, or the database changes what "
                "it stores: stop it and run again"
            )
        if then is None:
            then = Succession(
                serving=state.other,
                other=state.serving,
                phase="live",
                recall=state.recall,
                former=state.former and former,
                rechunks=state.rechunks,
            )
        self._note(replace(then, since=time.time()))
        self._move_aliases()
        if not then.rechunks:
            copy.take_late()
        return self._outcome()

    def _pass(self, copy: RowCopy) -> Pass | None:
        """One pass; ``None`` if it was stopped."""
        done = copy.run()
        self._passes.append(done)
        logger.info("a pass: %s", done)
        return None if self.options.stop.is_set() else done

    def _bridged(self, state: Succession, copy: RowCopy, engine: Engine) -> Succession:
        fitted = fit_bridge(copy.source, copy.target, engine=engine, copy=copy, least=self.least_recall)
        side = self.head.sibling(bridge_name(state.other), bare=True)
        try:
            side.create(FORM)
            for row in bridge_rows(fitted.bridge):
                side.write(row)
        finally:
            side.close()
        former = copy.source.own().fingerprint if fitted.goes_back else ""
        bridged = replace(state, recall=fitted.bridge.recall, former=former)
        self._note(bridged)
        return bridged

    def _writer(self, name: str, options: Mapping[str, Any]) -> CollectionSink[Any]:
        """The sink that fills a collection, with its own options."""
        source = self.head.named(self.old_name())
        serving = source.own()
        kind = "bm25" if source.ranks_texts else serving.sparse is not None
        hybrid = {"hybrid": kind} if kind and "hybrid" not in options else {}
        sink = self.head.sibling(name, bare=True, fields=serving.fields, **hybrid, **options)
        return self.head.adopt(sink) if ":" not in name else sink

    def _check_bridged(self, old: CollectionSink[Any]) -> None:
        """Raise InvalidRequestError for a collection whose questions no bridge takes to the old vectors."""
        assert self.change is not None
        if self.change.rechunks:
            raise InvalidRequestError(
                "a bridge is fitted on rows that both collections have, and chunks are cut anew; run without --bridge"
            )
        if old.own().sparse is not None or old.ranks_texts:
            raise InvalidRequestError(
                "a bridge takes questions to dense vectors only, and the collection is searched by sparse ones, too; "
                "run without --bridge, and search with the former model until the cut-over"
            )
        if (rows := old.count()) < LEAST_ROWS:
            raise InvalidRequestError(
                f"a bridge needs {LEAST_ROWS} rows, and the collection has {rows}; run without --bridge"
            )

    def _check_name(self) -> None:
        """Raise InvalidRequestError for the collection that serves another name."""
        base, mark, _ = self.head.collection.rpartition("__")
        succession = None
        if mark:
            with suppress(MillpondError):  # there is no such collection, or it is somebody else's
                succession = self.head.named(base).own().succession
        if succession is not None and self.head.collection in (succession.serving, succession.other):
            raise InvalidRequestError(
                f"collection {self.head.collection!r} belongs to the migration of {base!r}; name that one"
            )

    def _drop(self, name: str) -> None:
        """Drop a collection; the one of the name itself stays, empty, since it says which one serves."""
        sink = self.head.named(name)
        if name != self.head.collection:
            with suppress(InvalidRequestError):  # it is gone
                sink.own()
                sink.drop()
            return
        former: list[str] = []
        # A scan may pass over rows while others are deleted, so each begins anew.
        while ids := [row_id for row_id, _ in islice(sink.scan(), _DROPPED)]:
            if ids == former:
                raise SinkError(f"rows of collection {name!r} are still there after they were deleted; finish again")
            for start in range(0, len(ids), _PAGE):
                sink.delete_rows(ids[start : start + _PAGE])
            former = ids

    def _move_aliases(self) -> None:
        """Let aliases of the collection that serves no longer name the one that does, unless it is at another place."""
        found = self.succession()
        if found is not None and ":" not in found.other + found.serving:
            self.head.named(found.other).move_aliases(found.serving, but=self.head.collection)

    def _note(self, succession: Succession | None) -> None:
        """Store the succession; again if a run that noted its id at this moment has written the former one back."""
        # LanceDB refuses one of two notes that are written at the same time.
        requests = RetryingWriter(self.options.retry, self.options.stop, lambda error, seconds: None)
        for _ in range(5):
            requests.send(lambda: self.head.note_succession(succession))
            if self.head.succession() == succession:
                return
        raise SinkError(
            f"the metadata of collection {self.head.collection!r} is changed by another program all the time; stop "
            "that and run again"
        )

    def _is_same(self, serving: str) -> bool:
        """Whether the collection that serves is the one of this change: it was cut over before."""
        assert self.change is not None
        found = self.succession()
        if found is None or not found.other:
            return False
        with suppress(InvalidRequestError):
            before = self.head.named(found.other).own()
            return self.change.name(self.head.collection, before, self.head.check_name) == serving
        return False

    def _outcome(self, *, stopped: bool = False) -> Outcome:
        found = self.succession()
        return Outcome(
            collection=self.head.collection,
            serving=self.head.collection if found is None else found.serving,
            other="" if found is None else found.other,
            phase=None if found is None else found.phase,
            rows=self.head.count(),
            written=sum(each.written for each in self._passes),
            deleted=sum(each.deleted for each in self._passes),
            failed=self._passes[-1].failed if self._passes else 0,
            passes=len(self._passes),
            recall=None if found is None else found.recall,
            stopped=stopped,
            seconds=time.monotonic() - self._start,
        )
