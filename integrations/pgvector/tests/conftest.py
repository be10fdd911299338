"""The fixtures of all packages for databases, and an empty schema of a real PostgreSQL."""

import pytest
from tests.ingest.postgres import PostgresServer
from tests.passages import engine, minilm, records

__all__ = ["dsn", "engine", "minilm", "records"]


@pytest.fixture
def dsn(postgres: PostgresServer) -> str:
    """The address of an empty schema, on a server that the tests of this process share."""
    return postgres.schema()
