"""The README's Python blocks run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from llama_index.core import Settings
from tests.tiny.heads import write_splade

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.filterwarnings("ignore:Payload indexes have no effect in the local Qdrant")
def test_the_readme_runs(minilm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    program = "\n".join(blocks)
    assert "sentence-transformers/all-MiniLM-L6-v2" in program
    program = program.replace("sentence-transformers/all-MiniLM-L6-v2", Path(minilm).as_posix())
    assert "naver/splade-v3" in program
    program = program.replace("naver/splade-v3", write_splade(tmp_path / "splade").as_posix())
    before = Settings._embed_model
    try:
        exec(compile(program, str(README), "exec"), {})
    finally:
        Settings._embed_model = before
    output = capsys.readouterr().out
    assert "Bread rises because of yeast." in output
    assert "2 nodes, then 0\n" in output
