"""The README's Python blocks run, as one program, against a real server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.contract

README = Path(__file__).parents[1] / "README.md"


def test_readme(
    minilm: str, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    program = "\n".join(blocks).replace("sentence-transformers/all-MiniLM-L6-v2", minilm)
    assert program.count("postgresql://localhost/mydb") == 1
    monkeypatch.chdir(tmp_path)
    exec(compile(program.replace("postgresql://localhost/mydb", dsn), str(README), "exec"), scope := {})
    shown = capsys.readouterr().out.splitlines()
    assert len(blocks) == 2 and shown[0] == "2 of 2 records written"
    assert shown[1].endswith("bread: " + scope["hits"][0].text)
    scope["engine"].close()
