"""Progress bars: on a terminal and in a notebook's kernel, and nowhere else."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import termios

import pytest

pytestmark = pytest.mark.contract

# A kernel is known by IPython's application. What tqdm makes of it is tqdm's own code.
_PROGRAM = """
import sys, types, warnings
warnings.simplefilter("error")
where, widgets = sys.argv[1], sys.argv[2] == "widgets"
if where != "script":
    class Shell:
        config = {"IPKernelApp": {}} if where == "kernel" else {"TerminalIPythonApp": {}}
    ipython = sys.modules["IPython"] = types.ModuleType("IPython")
    ipython.get_ipython = Shell
    ipython.version_info = (8, 0)
    display = sys.modules["IPython.display"] = types.ModuleType("IPython.display")
    display.display = lambda container: print("a widget is displayed")
if where == "kernel":
    sys.modules["ipykernel.zmqshell"] = types.ModuleType("ipykernel.zmqshell")
if widgets:
    class Widget:
        def __init__(self, **options):
            self.layout, self.style = types.SimpleNamespace(), types.SimpleNamespace()
            self.bar_style = self.value = ""
            vars(self).update(options)
    ipywidgets = sys.modules["ipywidgets"] = types.ModuleType("ipywidgets")
    ipywidgets.__version__ = "8.0"
    ipywidgets.FloatProgress = ipywidgets.HTML = Widget
    ipywidgets.HBox = type("HBox", (Widget,), {})
    display.HTML = object

from millpond.support.progress import draw_bar, progress_bar
with progress_bar(range(40), show=True) as bar:
    bar.update(40)
with progress_bar(range(41), show=False) as bar:
    bar.update(41)
with draw_bar(show=True, total=42, desc="Pooling") as bar:
    bar.update(42)
with draw_bar(show=False, total=43) as bar:
    bar.update(43)
"""


def _run(where: str, *, terminal: bool = False, widgets: bool = False) -> tuple[str, str]:
    command = [sys.executable, "-c", _PROGRAM, where, "widgets" if widgets else "none"]
    if not terminal:
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr
    leader, follower = os.openpty()
    termios.tcsetwinsize(follower, (24, 80))
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=follower, text=True, timeout=100, check=False)
    os.close(follower)
    with open(leader, "rb", buffering=0) as written, contextlib.suppress(OSError):  # raised at the end
        chunks: list[bytes] = []
        while chunk := written.read(1 << 16):
            chunks.append(chunk)
    errors = b"".join(chunks).decode()
    assert done.returncode == 0, errors
    return done.stdout, errors


@pytest.mark.parametrize("where", ["script", "ipython"])
def test_a_bar_is_drawn_on_a_terminal_only(where: str) -> None:
    assert _run(where) == ("", "")
    _, errors = _run(where, terminal=True)
    assert "40/40" in errors
    assert "Pooling: 100%" in errors
    assert "/41" not in errors
    assert "/43" not in errors


def test_a_notebook_without_widgets_gets_bars_of_text_and_no_warning() -> None:
    _, errors = _run("kernel")
    assert "40/40" in errors
    assert "42/42" in errors
    assert "IProgress" not in errors
    assert "/41" not in errors
    assert "/43" not in errors


def test_a_notebook_with_widgets_gets_widgets() -> None:
    shown, errors = _run("kernel", widgets=True)
    assert shown.count("a widget is displayed") == 2
    assert "%|" not in errors
