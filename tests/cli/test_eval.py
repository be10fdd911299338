"""``millpond eval`` and ``millpond.mteb`` where mteb is not installed; tests/doors has the others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.cli.conftest import Run

import millpond.mteb
from millpond.errors import MissingExtraError


@pytest.fixture(autouse=True)
def without_mteb(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("millpond.mteb.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mteb", None)


def test_the_command_names_the_extra(run: Run, model: Path):
    err = run("eval", "STS12", "-m", model, code=2).err
    assert err == "millpond: millpond eval needs mteb: pip install 'millpond[mteb]'\n"


@pytest.mark.parametrize("name", ["MillpondEncoder", "MillpondLateInteraction", "beir_task"])
def test_a_name_names_the_extra(name: str):
    with pytest.raises(MissingExtraError, match=f"millpond.mteb.{name} needs mteb.*pip install 'millpond\\[mteb\\]'"):
        getattr(millpond.mteb, name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        millpond.mteb.nothing  # noqa: B018
    assert name in dir(millpond.mteb)
