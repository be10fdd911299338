"""The README's Python blocks run, as one program, in an empty folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.readme import run_readme

from millpond.late_interaction import Ragged, maxsim

pytestmark = pytest.mark.contract


def test_readme(
    minilm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    count, shown, scope = run_readme(__file__, {"sentence-transformers/all-MiniLM-L6-v2": minilm}, capsys)
    assert count == 4 and shown[0] == "2 of 2 records written"
    assert shown[1].endswith("bread: " + scope["hits"][0].text)
    queries, documents = ([scope["question"]], list(scope["passages"].embeddings))
    scores = maxsim(*(Ragged.from_matrices(matrices, width=384) for matrices in (queries, documents)))
    assert shown[2] == f"{scores[0, 1]:.3f} bread"
    assert shown[3:] == ["Bread rises because of yeast."] * 2
    scope["engine"].close()
