"""The README's Python blocks run."""

from __future__ import annotations

import pytest
from tests.readme import run_readme


@pytest.mark.filterwarnings("ignore:Payload indexes have no effect in the local Qdrant")
def test_the_readme_runs(minilm: str, splade: str, capsys: pytest.CaptureFixture[str]) -> None:
    instead = {"sentence-transformers/all-MiniLM-L6-v2": minilm, "naver/splade-v3": splade}
    _, shown, _ = run_readme(__file__, instead, capsys)
    assert any("Bread rises because of yeast." in line for line in shown)
