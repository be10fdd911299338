"""The README's Python blocks run, as one program, against a real server."""

from __future__ import annotations

import pytest
from tests.readme import run_readme

pytestmark = pytest.mark.contract


def test_readme(minilm: str, dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
    instead = {"sentence-transformers/all-MiniLM-L6-v2": minilm, "postgresql://localhost/mydb": dsn}
    count, shown, scope = run_readme(__file__, instead, capsys)
    assert count == 2 and shown[0] == "2 of 2 records written"
    assert shown[1].endswith("bread: " + scope["hits"][0].text)
    scope["engine"].close()
