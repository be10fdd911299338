"""The bar of a checkpoint that takes long to load: drawn after two seconds, gone at the end."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from millpond import Engine
from millpond.support import load_progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Where the bars are drawn, each step of them."""
    screen = Terminal()

    def draw(*, show: bool, **options: Any) -> Any:
        return tqdm(file=screen, disable=None if show else True, ncols=100, mininterval=0, **options)

    monkeypatch.setattr(load_progress, "draw_bar", draw)
    return screen


@pytest.mark.parametrize(
    ("family", "stage"),
    [pytest.param("gpt2", "reading weights", marks=pytest.mark.torch), ("bert", "arranging weights")],
)
def test_a_checkpoint_that_takes_long_has_a_bar_that_vanishes(
    family: str,
    stage: str,
    checkpoint_of: Callable[..., Path],
    terminal: Terminal,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load_progress, "_SECONDS_UNTIL_DRAWN", 0.0)
    folder = checkpoint_of(family, config={"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2})
    Engine(folder, dtype="float32", device="cpu").close()
    drawn = terminal.getvalue().split("\r")
    if family == "bert" and drawn == [""]:
        pytest.skip("the compiled kernels do not run here, and nothing is arranged")
    lines = [line for line in drawn if line.startswith(f"{folder.name}: {stage}:")]
    assert len(lines) > 2 and len(set(lines)) == len(lines), drawn  # it moves
    assert drawn[-1].strip() == drawn[-2].strip() == ""  # cleared


def test_a_checkpoint_that_is_loaded_quickly_has_none(checkpoint_of: Callable[..., Path], terminal: Terminal) -> None:
    Engine(checkpoint_of("bert"), dtype="float32", device="cpu").close()
    assert terminal.getvalue() == ""


def test_nothing_is_drawn_where_there_is_no_terminal(
    checkpoint_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load_progress, "_SECONDS_UNTIL_DRAWN", 0.0)
    Engine(checkpoint_of("bert"), dtype="float32", device="cpu").close()
    assert capsys.readouterr().err == ""
