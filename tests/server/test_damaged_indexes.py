"""An index with a damaged file answers 503 with its name, from the start or from then on; the others serve."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from millpond.errors import SourceNotFoundError
from millpond.server import ModelConfig, ServedModels, ServerConfig, create_app

KEY = "a key"
SEARCH = {"query": "How deep is the pond?"}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("search", SEARCH),
    ("explain", {**SEARCH, "id": "pond"}),
    ("add", {"ids": ["new"], "texts": ["A new text."]}),
    ("delete", {"ids": ["pond"]}),
]


def overwrite(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix != ".lock":
            # Not in place: that is the memory of a process which has mapped it.
            damaged = path.with_suffix(".damaged")
            damaged.write_bytes(b"\xff" * path.stat().st_size)
            damaged.replace(path)


def cut_manifests(folder: Path) -> None:
    for path in folder.glob("*.json"):
        damaged = path.with_suffix(".damaged")
        damaged.write_bytes(path.read_bytes()[:-20])
        damaged.replace(path)


def remove_all(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.fixture
def folders(indexes: tuple[str, ...], tmp_path: Path) -> dict[str, Path]:
    """Copies of the indexes docs and drafts."""
    named = [setting.partition("=") for setting in indexes]
    return {name: Path(shutil.copytree(path, tmp_path / name)) for name, _, path in named}


@pytest.fixture
def serve(colbert: Path, folders: dict[str, Path]) -> Callable[[], Any]:
    @contextmanager
    def serve() -> Iterator[TestClient]:
        models = ServedModels.load([ModelConfig(model=str(colbert), names=("colbert",), dtype="float32")])
        config = ServerConfig(api_keys=(KEY,), indexes=tuple(f"{name}={path}" for name, path in folders.items()))
        with TestClient(create_app(models, config), headers={"Authorization": f"Bearer {KEY}"}) as client:
            yield client

    return serve


def states(client: TestClient) -> dict[str, str]:
    return {each["name"]: each["state"] for each in client.get("/v1/indexes").json()["data"]}


def assert_damaged(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    assert states(client) == {"docs": "ready", "drafts": "damaged"}
    for verb, body in CALLS:
        response = client.post(f"/v1/indexes/drafts/{verb}", json=body)
        error = response.json()["error"]
        assert (response.status_code, error["type"]) == (503, "ServiceUnavailableError"), (verb, error)
        assert "index `drafts` is damaged" in error["message"]
        assert "/tmp" not in error["message"] and "drafts/" not in error["message"]
    assert any("drafts" in record.getMessage() for record in caplog.records if record.levelno == logging.ERROR)
    found = client.post("/v1/indexes/docs/search", json=SEARCH)
    assert found.status_code == 200 and len(found.json()["results"]) == 3
    for path in ("/health", "/ready"):
        assert client.get(path).status_code == 200


@pytest.mark.parametrize("damage", [overwrite, cut_manifests])
def test_a_server_starts_with_a_damaged_index(
    serve: Callable[[], Any], folders: dict[str, Path], caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    damage(folders["drafts"])
    with serve() as client:
        assert_damaged(client, caplog)


@pytest.mark.parametrize("damage", [overwrite, remove_all])
def test_an_index_is_damaged_under_a_server(
    serve: Callable[[], Any],
    folders: dict[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
) -> None:
    whole = shutil.copytree(folders["drafts"], tmp_path / "whole")
    with serve() as client:
        assert states(client) == {"docs": "ready", "drafts": "ready"}
        damage(folders["drafts"])
        assert_damaged(client, caplog)
        shutil.rmtree(folders["drafts"], ignore_errors=True)
        shutil.copytree(whole, folders["drafts"])
        assert client.post("/v1/indexes/drafts/search", json=SEARCH).status_code == 200  # it is restored


def test_a_path_without_an_index_is_refused_at_the_start(serve: Callable[[], Any], folders: dict[str, Path]) -> None:
    remove_all(folders["drafts"])
    with pytest.raises(SourceNotFoundError, match="build it first"), serve():
        pass
