"""The README's Python blocks run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.filterwarnings("ignore:Payload indexes have no effect in the local Qdrant")
def test_the_readme_runs(minilm: str, splade: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    program = "\n".join(blocks)
    assert "sentence-transformers/all-MiniLM-L6-v2" in program
    program = program.replace("sentence-transformers/all-MiniLM-L6-v2", Path(minilm).as_posix())
    program = program.replace("naver/splade-v3", Path(splade).as_posix())
    exec(compile(program, str(README), "exec"), {})
    printed = capsys.readouterr().out
    assert "Bread rises because of yeast." in printed
