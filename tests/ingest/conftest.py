"""The engine of the tests of ingestion."""

import pytest


@pytest.fixture
def engine(engine_of):
    """The engine of a tiny checkpoint of 48 dimensions, shared by all tests."""
    return engine_of("bert")
