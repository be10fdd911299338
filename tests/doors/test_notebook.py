"""The notebooks that need the library of a door: every cell runs in one process, and puts out what its text says."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.door

FOLDER = Path(__file__).parents[2] / "notebooks"


def test_two_stages_in_haystack(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    from matplotlib import pyplot

    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads((FOLDER / "6_haystack.ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            code = compile("".join(cell["source"]), cell["id"], "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            if code.co_flags & inspect.CO_COROUTINE:
                asyncio.run(eval(code, names))
            else:
                exec(code, names)
    figures = [pyplot.figure(number) for number in pyplot.get_fignums()]
    assert [len(figure.axes[0].lines) for figure in figures] == [len(names["questions"])] == [10]
    pyplot.close("all")
    assert names["written"] == len(names["documents"]) > 100
    assert names["late"][0].id == "shutil.copytree" and len(names["late"]) == 3
    before, after = (sum(1 / each for each in found if each) / 10 for found in names["ranks"].values())
    assert all(names["ranks"]["retriever"]) and before > 0.4 and after > 0.6
    printed = capsys.readouterr().out
    assert "True\nMillpondTextEmbedder: engine= cannot be serialized" in printed
    assert "\n".join(printed.splitlines()[1:3]).count("shutil.") >= 2
    names["engine"].close()
