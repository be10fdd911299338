"""The notebooks that need the library of a door: every cell runs in one process, and puts out what its text says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.docs.test_notebooks import Ran
from tests.docs.test_notebooks import ran as ran

pytestmark = pytest.mark.door


def test_two_stages_in_haystack(ran: Callable[[str], Ran], capsys: pytest.CaptureFixture[str]) -> None:
    haystack = ran("6_haystack")
    names = haystack.names
    assert [len(figure.axes[0].lines) for figure in haystack.figures] == [len(names["questions"])] == [10]
    assert names["written"] == len(names["documents"]) > 100
    assert names["late"][0].id == "shutil.copytree" and len(names["late"]) == 3
    before, after = (sum(1 / each for each in found if each) / 10 for found in names["ranks"].values())
    assert all(names["ranks"]["retriever"]) and before > 0.4 and after > 0.6
    printed = capsys.readouterr().out
    assert "True\nMillpondTextEmbedder: engine= cannot be serialized" in printed
    assert "\n".join(printed.splitlines()[1:3]).count("shutil.") >= 2
    names["engine"].close()
