"""The modules for other projects' classes say what to install where a library is absent."""

from __future__ import annotations

import importlib
import sys

import pytest

from millpond.errors import MissingExtraError


@pytest.mark.parametrize("library", ["dspy", "redisvl"])
def test_the_command_is_named(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"millpond.compat.{library}", raising=False)
    with pytest.raises(MissingExtraError, match=f"pip install {library}"):
        importlib.import_module(f"millpond.compat.{library}")
