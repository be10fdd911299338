"""Tests that every sink and every late-interaction index passes, for whoever writes one; they need pytest.

A module of tests subclasses a contract, and pytest runs it::

    from millpond.testing import SinkContract

    class TestMySink(SinkContract):
        def make(self, folder, **options):
            return MySink(folder / "db", **options)

:class:`SinkContract` is about the three methods of a :class:`~millpond.ingest.Sink` and the optional ones,
:class:`CollectionSinkContract` about a :class:`~millpond.ingest.CollectionSink`,
:class:`IndexContract` about a :class:`~millpond.late_interaction.LateInteractionIndex`, :class:`AdapterContract` about
an adapter of a framework. Those of sinks and indexes need no model: :class:`WordEngine` stands for one.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from millpond.errors import MissingExtraError

if TYPE_CHECKING:
    from millpond.testing.adapter import AdapterContract
    from millpond.testing.collection import CollectionSinkContract
    from millpond.testing.engine import WordEngine
    from millpond.testing.index import IndexContract
    from millpond.testing.sink import SinkContract

_MODULES = {
    "AdapterContract": "adapter",
    "CollectionSinkContract": "collection",
    "IndexContract": "index",
    "SinkContract": "sink",
    "WordEngine": "engine",
}

__all__ = ["AdapterContract", "CollectionSinkContract", "IndexContract", "SinkContract", "WordEngine"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    except ModuleNotFoundError as error:
        if error.name != "pytest":
            raise
        raise MissingExtraError(f"millpond.testing.{name} needs pytest: pip install pytest") from None
