"""The README's Python blocks run, as one program, in an empty folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.contract

README = Path(__file__).parents[1] / "README.md"


def test_readme(
    minilm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    program = "\n".join(blocks).replace("sentence-transformers/all-MiniLM-L6-v2", minilm)
    monkeypatch.chdir(tmp_path)
    exec(compile(program, str(README), "exec"), scope := {})
    shown = capsys.readouterr().out.splitlines()
    assert (
        len(blocks) == 4
        and shown[0] == "2 of 2 records written"
        and shown[1].endswith("bread: " + scope["hits"][0].text)
        and shown[2].startswith("Bread rises because of yeast. ")
        and shown[3].endswith(" bread: Bread rises because of yeast.")
    )
    scope["engine"].close()
