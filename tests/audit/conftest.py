"""Models with and without prompts, and a database of each kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.audit.corpus import Bench
from tests.audit.editors import DATABASES
from tests.tiny import Layout, Normalize, Pooling

from millpond import Engine

LAYOUT = Layout(modules=(Pooling(), Normalize()), prompts={"query": "find: ", "document": "keep: "})
CONTRACT = [pytest.param(name, marks=pytest.mark.contract) for name in ("qdrant", "milvus", "lancedb", "pgvector")]


@pytest.fixture(scope="session")
def model(checkpoint_of: Callable[..., Path]) -> Path:
    return checkpoint_of("bert", sentence_transformers=LAYOUT)


@pytest.fixture(scope="session")
def other(checkpoint_of: Callable[..., Path]) -> Path:
    return checkpoint_of("roberta", sentence_transformers=LAYOUT)


@pytest.fixture(scope="session")
def bench(engine_of: Callable[..., Engine], model: Path, other: Path) -> Bench:
    return Bench(engine=engine_of(model), other=engine_of(other), pooled=engine_of(model, pooling="cls"))


@pytest.fixture(params=CONTRACT)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database of each kind."""
    pytest.importorskip(f"millpond_{request.param}")
    if request.param == "pgvector":
        return f"pgvector+{request.getfixturevalue('postgres').schema()}"
    return DATABASES[request.param].format(tmp_path)
