"""The pages that need the library of a door: their Python runs, as that of the other pages does."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.docs.test_pages import DOOR_PAGES, run_page
from tests.docs.test_pages import checkpoints as checkpoints

pytestmark = pytest.mark.door


@pytest.mark.parametrize("page", DOOR_PAGES, ids=lambda page: page.name)
def test_the_python_of_a_page_runs(
    page: Path, checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(page, checkpoints)
