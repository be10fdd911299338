"""The README's Python blocks run."""

from __future__ import annotations

from pathlib import Path

import pytest
from llama_index.core import Settings
from tests.readme import run_readme


@pytest.mark.filterwarnings("ignore:Payload indexes have no effect in the local Qdrant")
def test_the_readme_runs(
    minilm: str,
    prompted_splade: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)  # the cache and the dead letters
    before = Settings._embed_model
    try:
        instead = {"sentence-transformers/all-MiniLM-L6-v2": minilm, "naver/splade-v3": prompted_splade}
        _, shown, _ = run_readme(__file__, instead, capsys)
    finally:
        Settings._embed_model = before
    assert any("Bread rises because of yeast." in line for line in shown) and "2 nodes, then 0" in shown
    assert "2 nodes stored" in shown
