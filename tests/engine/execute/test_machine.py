"""What a batch meets on a machine: cores, quotas, threads, Ctrl-C, the errors of devices; and bars on terminals."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import termios
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.gates import until

from millpond.backends.device_errors import LostDevice, is_device_lost, is_out_of_memory
from millpond.backends.native.threads import NativeThreads
from millpond.engine.execute.cores import Cores, Turn
from millpond.engine.execute.interrupts import defer_sigint
from millpond.errors import DeviceLostError, MillpondError
from millpond.support.processor import usable_cores


def test_a_core_is_claimed_once():
    cores = Cores(2)
    assert [cores.claim(wait=False) for _ in range(3)] == [True, True, False]
    cores.release()
    assert cores.free == 1
    assert cores.claim(wait=False)


def test_who_waits_first_is_served_first_and_before_who_comes_later():
    cores, served = Cores(1), []
    cores.claim()

    def wait(number):
        cores.claim()
        served.append(number)
        cores.release()

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(4)]
    for number, thread in enumerate(threads):
        thread.start()
        until(lambda number=number: len(cores._waiting) == number + 1)
    cores.release()
    for thread in threads:
        thread.join(60)
    assert served == [0, 1, 2, 3] and cores.free == 1


def test_a_wait_that_was_long_enough_leaves_no_claim():
    cores = Cores(1)
    cores.claim()
    assert not cores.claim(seconds=0.01)
    cores.release()
    assert cores.free == 1 and cores.claim(seconds=0.01)


def test_a_spare_thread_computes_beyond_the_cores_but_not_before_who_waits_for_one():
    cores = Cores(1)
    cores.claim()
    assert cores.claim(turn=Turn(spare=1), seconds=10) and cores.free == 0
    assert not cores.claim(turn=Turn(spare=1), seconds=0.01)
    waiting = threading.Thread(target=cores.claim)
    waiting.start()
    until(lambda: cores._waiting)
    cores.release()  # of two: there is no core yet, and nobody overtakes who waits for it
    assert not cores.claim(turn=Turn(spare=1), seconds=0.01) and waiting.is_alive()
    cores.release()
    waiting.join(60)
    assert not waiting.is_alive() and cores.claim(turn=Turn(spare=1), seconds=10)


def test_a_claim_waits_for_a_release():
    cores = Cores(1)
    cores.claim()
    got = []
    thread = threading.Thread(target=lambda: got.append(cores.claim()))
    thread.start()
    assert not got
    cores.release()
    thread.join(60)
    assert got == [True]
    assert cores.free == 0


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        (None, {"cpu.max": "150000 100000"}, 2),
        (None, {"cpu.max": "50000 100000"}, 1),
        (None, {"cpu.max": "max 100000"}, 64),
        (None, {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        (None, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 64),
        (None, {"cpu.max": "nonsense"}, 64),
        (None, {}, 64),
        ("0::/jobs/mine", {"jobs/mine/cpu.max": "200000 100000", "cpu.max": "max 100000"}, 2),
        ("0::/jobs/mine", {"jobs/mine/cpu.max": "max 100000", "jobs/cpu.max": "300000 100000"}, 3),
        ("0::/jobs/mine", {"jobs/mine/cpu.max": "400000 100000", "jobs/cpu.max": "300000 100000"}, 3),
        ("0::/jobs/mine", {"jobs/other/cpu.max": "100000 100000"}, 64),
        ("0::/../../elsewhere", {"cpu.max": "500000 100000"}, 5),
        (
            "4:memory:/m\n3:cpu,cpuacct:/jobs",
            {"cpu/jobs/cpu.cfs_quota_us": "200000", "cpu/jobs/cpu.cfs_period_us": "100000"},
            2,
        ),
    ],
)
def test_a_quota_and_those_of_the_groups_above_limit_the_cores(own, files, expected, tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)), raising=False)
    for name, content in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(content)
    if own is not None:
        (tmp_path / "own").write_text(own + "\n")
    assert usable_cores(tmp_path / "root", tmp_path / "own") == expected


@pytest.fixture
def backbone():
    """Two million multiplied weights, and an embedding table that is only looked up."""
    import torch

    return torch.nn.Sequential(torch.nn.Embedding(9999, 8), torch.nn.Linear(1000, 2000, bias=True))


@pytest.mark.torch
def test_more_tokens_more_threads(backbone, monkeypatch):
    import torch

    from millpond.backends.torch.threads import TorchThreads

    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    threads = TorchThreads(backbone)
    assert [threads.count(tokens) for tokens in (1, 999, 1000, 2000, 10**6)] == [1, 1, 2, 3, 4]
    assert [threads.count(tokens, awake=True) for tokens in (1, 24, 25, 10**6)] == [1, 1, 2, 4]


@pytest.mark.torch
def test_torchs_number_is_back_afterwards():
    import torch

    from millpond.backends.torch.threads import on_threads

    before = torch.get_num_threads()
    with on_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with pytest.raises(KeyError), on_threads(before + 1):
        raise KeyError
    assert torch.get_num_threads() == before


def test_a_native_batch_has_the_number_of_its_thread():
    threads = NativeThreads(1, most=4)
    assert threads.of_batch() == 4
    with threads.running(3, awake=False):
        assert (threads.of_batch(), in_a_thread(threads.of_batch)) == (3, 4)  # of this thread only
    assert threads.of_batch() == 4
    with pytest.raises(KeyError), threads.running(3, awake=True):
        raise KeyError
    assert threads.of_batch() == 4


def in_a_thread(function):
    """The result of ``function`` in a new thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@pytest.mark.torch
def test_the_default_of_later_threads_is_not_that_of_this_one():
    import torch

    from millpond.backends.torch.threads import default_threads

    before = torch.get_num_threads()
    assert in_a_thread(lambda: (torch.set_num_threads(before + 2), default_threads(before + 1))) == (None, None)
    try:
        assert torch.get_num_threads() == before  # the number of this thread
        assert in_a_thread(torch.get_num_threads) == before + 1
    finally:
        default_threads(before)


@pytest.fixture(autouse=True)
def pythons_own_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


main_thread = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="only the main thread sets handlers"
)


@main_thread
def test_an_interrupt_waits_for_the_end_of_the_block():
    done = []

    def work():
        with defer_sigint():
            signal.raise_signal(signal.SIGINT)
            done.append("the rest")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["the rest"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@main_thread
def test_without_an_interrupt_the_block_changes_nothing():
    with defer_sigint():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(ValueError, match="of the block"), defer_sigint():
        raise ValueError("of the block")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@main_thread
def test_a_programs_own_handler_stays():
    heard = []

    def own(number, frame):
        heard.append(number)

    signal.signal(signal.SIGINT, own)
    with defer_sigint():
        assert signal.getsignal(signal.SIGINT) is own
        signal.raise_signal(signal.SIGINT)
        assert heard == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is own


HINTS = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call\nCompile with `TORCH_USE_CUDA_DSA`"
)


LOST = (
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: device-side assert triggered",
    "CUDA error: unspecified launch failure",
    "CUDA error: misaligned address",
    "CUDA error: an illegal instruction was encountered",
    "CUDA error: uncorrectable ECC error encountered",
    "CUDA error: uncorrectable NVLink error detected during the execution",
    "CUDA error: operation not supported on global/shared address space",
    "CUDA error: the launch timed out and was terminated",
    "CUDA error: hardware stack error",
)


HARMLESS = (
    "CUDA error: invalid configuration argument",
    "CUDA error: no kernel image is available for execution on the device",
    "CUDA error: operation not permitted when stream is capturing",
    "CUDA error: operation failed due to a previous error during capture",
    "CUDA error: too many resources requested for launch",
    "CUDA error: operation not supported",
    "CUDA error: invalid argument",
)


OUT_OF_MEMORY = (
    "CUDA error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    'captures_underway.empty() INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/CUDACachingAllocator.cpp":3941',
)


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["RuntimeError", "AcceleratorError"])
@pytest.mark.parametrize("text", [*LOST, *HARMLESS, *OUT_OF_MEMORY])
def test_an_error_is_of_the_device_of_one_launch_or_of_memory(text: str, kind: str) -> None:
    import torch

    error = getattr(torch, kind, RuntimeError)(text + HINTS)
    assert is_device_lost(error) == (text in LOST)
    assert is_out_of_memory(error) == (text in OUT_OF_MEMORY)


@pytest.mark.torch
@pytest.mark.parametrize("text", ["CUDA error: unknown error", "no words for it", ""])
def test_an_accelerator_s_error_that_nobody_knows_is_a_lost_device(text: str) -> None:
    import torch

    assert is_device_lost(torch.AcceleratorError(text))
    assert not is_device_lost(RuntimeError(text))


@pytest.mark.torch
@pytest.mark.parametrize(("code", "lost"), [(1, False), (9, False), (901, False), (700, True), (999, True)])
def test_the_number_of_an_error_counts_too(code: int, lost: bool) -> None:
    import torch

    error = torch.AcceleratorError("hip error")
    error.error_code = code  # type: ignore[attr-defined]
    assert is_device_lost(error) is lost


@pytest.mark.torch
def test_the_error_names_device_reason_and_way_out() -> None:
    import torch

    lost = LostDevice.of("cuda:1", torch.AcceleratorError(LOST[0] + HINTS))
    error = lost.error()
    assert isinstance(error, MillpondError) and error is not lost.error()
    assert (error.device, error.reason) == ("cuda:1", LOST[0])
    for part in ("cuda:1", LOST[0], "restart the process", "another replica"):
        assert part in str(error)
    assert "TORCH_USE_CUDA_DSA" not in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, DeviceLostError)
    assert (str(again), again.device, again.reason) == (str(error), error.device, error.reason)


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


@pytest.mark.contract
@pytest.mark.parametrize("where", ["script", "ipython"])
def test_a_bar_is_drawn_on_a_terminal_only(where: str) -> None:
    assert _run(where) == ("", "")
    _, errors = _run(where, terminal=True)
    assert "40/40" in errors
    assert "Pooling: 100%" in errors
    assert "/41" not in errors
    assert "/43" not in errors


@pytest.mark.contract
def test_a_notebook_without_widgets_gets_bars_of_text_and_no_warning() -> None:
    _, errors = _run("kernel")
    assert [part in errors for part in ("40/40", "42/42", "IProgress", "/41", "/43")] == [True] * 2 + [False] * 3


@pytest.mark.contract
def test_a_notebook_with_widgets_gets_widgets() -> None:
    shown, errors = _run("kernel", widgets=True)
    assert shown.count("a widget is displayed") == 2
    assert "%|" not in errors
