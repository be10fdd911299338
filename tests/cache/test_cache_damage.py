"""Damage anywhere in a cache's file, before and while an engine embeds: it ends normally, with the right vectors."""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tests.tiny import write_checkpoint

from millpond import Engine, VectorCache

PAGE = 4096
TEXTS = [f"text {number} of the mill" for number in range(600)]
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("damage") / "bert", "bert")


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[Engine]:
    with Engine(model, dtype="float32", device="cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(plain: Engine) -> npt.NDArray[np.float32]:
    return plain.embed(TEXTS).embeddings


@pytest.fixture(scope="module")
def filled(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the vectors of all texts."""
    path = tmp_path_factory.mktemp("filled") / "cache.db"
    with Engine(model, dtype="float32", device="cpu", cache=path) as engine:
        engine.embed(TEXTS)
    return path


def overwrite(start: int, length: int, byte: int | None = 0) -> Damage:
    """Bytes at ``start`` (from the end, if negative) become ``byte``, or random ones."""

    def damage(path: Path) -> None:
        size = path.stat().st_size
        data = random.Random(1).randbytes(length) if byte is None else bytes([byte]) * length
        with path.open("r+b") as file:
            file.seek(start % size)
            file.write(data)

    return damage


def log(damage: Damage) -> Damage:
    """The damage, done to the write-ahead log."""
    return lambda path: damage(Path(f"{path}-wal"))


def truncate(share: float) -> Damage:
    return lambda path: os.truncate(path, int(path.stat().st_size * share))


def scattered(path: Path) -> None:
    chance = random.Random(5)
    size = path.stat().st_size
    with path.open("r+b") as file:
        for _ in range(200):
            file.seek(chance.randrange(size))
            file.write(chance.randbytes(8))


def replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_text(path: Path) -> None:
    other = path.with_name("other")
    other.write_text("no cache\n" * 999)
    other.replace(path)


def delete_with_log(path: Path) -> None:
    for end in ("", "-wal", "-shm"):
        Path(f"{path}{end}").unlink()


def move_folder(path: Path) -> None:
    path.parent.rename(path.parent.with_name("moved"))


def replace_by_another_cache(path: Path) -> None:
    other = path.with_name("other")
    VectorCache(other).close()
    other.replace(path)


MEANWHILE: dict[str, Damage] = {
    "header": overwrite(0, 100),
    "schema page": overwrite(0, PAGE, None),
    "data pages": overwrite(20 * PAGE, 20 * PAGE, None),
    "last pages": overwrite(-5 * PAGE, 5 * PAGE),
    "scattered": scattered,
    "truncated to a half": truncate(0.5),
    "truncated to nothing": truncate(0),
    "log noise": log(overwrite(32, 64 * PAGE, None)),
    "log deleted": lambda path: Path(f"{path}-wal").unlink(),
    "deleted": lambda path: path.unlink(),
    "deleted with its log": delete_with_log,
    "replaced by text": replace_by_text,
    "replaced by another cache": replace_by_another_cache,
    "replaced by a folder": replace_by_a_folder,
    "its folder moved away": move_folder,
}


FAST = ("schema page", "data pages", "deleted", "replaced by a folder")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in MEANWHILE]
)
def test_a_run_ends_with_the_right_vectors_when_its_cache_is_damaged_meanwhile(
    model: Path,
    plain: Engine,
    expected: npt.NDArray[np.float32],
    filled: Path,
    tmp_path: Path,
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "folder" / "cache.db"
    path.parent.mkdir()
    shutil.copy(filled, path)
    fresh = [f"new {text}" for text in TEXTS]
    right = plain.embed(fresh).embeddings
    with Engine(model, dtype="float32", device="cpu", cache=path) as engine:
        assert engine.embed(TEXTS).cached.all()
        np.testing.assert_allclose(engine.embed(fresh[:300]).embeddings, right[:300], atol=1e-5)
        MEANWHILE[name](path)
        for _ in range(2):
            np.testing.assert_allclose(engine.embed(TEXTS).embeddings, expected, atol=1e-5)
            np.testing.assert_allclose(engine.embed(fresh).embeddings, right, atol=1e-5)
            for start in range(0, 600, 20):
                np.testing.assert_allclose(
                    engine.embed(TEXTS[start : start + 20]).embeddings, expected[start : start + 20], atol=1e-5
                )
        assert engine.cache is not None
        lost = engine.cache.unwritten
    assert len(warnings(caplog)) <= 4, "a line for each kind of error, not for each batch"
    if lost:
        assert any("cannot be cached" in line for line in warnings(caplog))
    if name.startswith(("deleted", "replaced by another")):
        assert any("deleted or replaced" in line for line in warnings(caplog))
        with VectorCache(path) as cache:
            assert len(cache) > 0, "the file that was made again is used"
