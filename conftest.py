"""For the tests of all five packages: the real data, and no internet."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked ``network`` may leave this machine; everything else is stopped by pytest-socket."""
    for item in items:
        if item.get_closest_marker("network"):
            item.add_marker("enable_socket")


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of BEIR-format sets that ``MILLPOND_DATA`` names."""
    folder = os.environ.get("MILLPOND_DATA")
    if not folder:
        pytest.skip("MILLPOND_DATA is not set; it names a folder of BEIR-format sets")
    path = Path(folder)
    assert path.is_dir(), f"MILLPOND_DATA={folder!r} is not a folder"
    return path
