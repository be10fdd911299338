"""Which tests of the contract a database takes part in."""

from __future__ import annotations

import pytest

# Their tables have the form "plain" only, whose columns the stores of frameworks take by name.
PLAIN = {"lancedb", "pgvector"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the field layouts that a database does not have."""
    chosen = [(item, getattr(item, "callspec", None)) for item in items]
    absent = [
        item
        for item, call in chosen
        if call is not None
        and {call.params.get("place"), call.params.get("filled")} & PLAIN
        and call.params.get("form", "plain") != "plain"
    ]
    if absent:
        items[:] = [item for item in items if item not in absent]
        config.hook.pytest_deselected(items=absent)


@pytest.fixture
def engine(engine_of):
    """The engine of a tiny checkpoint of 48 dimensions, shared by all tests."""
    return engine_of("bert")
