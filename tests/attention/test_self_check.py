"""The self-check: planted mistakes in kernels are noticed and disabled, and right results are remembered."""

import json
import logging
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from millpond.backends import kernel_check
from millpond.backends.kernel_check import (
    LENGTHS,
    Case,
    DeviceBrokenError,
    Row,
    check,
    disabled,
    run,
    similarity,
)
from millpond.backends.torch.attention import kernels, matmul_attention, native, sdpa, self_check
from millpond.backends.torch.attention.segments import Segments
from millpond.backends.torch.attention.self_check import attention_rows, computed
from millpond.backends.torch.attention.signature import KernelError

CPU = torch.device("cpu")
ROWS = [native, matmul_attention]
every_row = pytest.mark.parametrize("kernel", ROWS, ids=lambda kernel: kernel.NAME)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder of the notes; no kernel is disabled."""
    monkeypatch.setattr(kernel_check, "_disabled", {})
    monkeypatch.setattr(kernel_check, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setenv("MILLPOND_SELF_CHECK", "1")
    return tmp_path / "cache" / "self-check"


@pytest.fixture
def only(monkeypatch):
    """Lets one kernel of the table, and the last one, serve."""

    def only(kernel):
        if kernel.unavailable() is not None:
            pytest.skip(kernel.unavailable())
        monkeypatch.setattr(kernels, "KERNELS", (kernel, sdpa))

    return only


def rows(dtype=torch.bfloat16):
    return attention_rows(CPU, dtype)


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def plant(monkeypatch, kernel, mistake):
    """Let a kernel of the table make a mistake: a function of its right result and the call."""
    right = kernel.attend
    monkeypatch.setattr(kernel, "attend", lambda *call: mistake(right, *call))


def with_masking(**changed):
    def mistake(right, q, k, v, segments, masking):
        fields = {name: value(masking) if callable(value) else value for name, value in changed.items()}
        return right(q, k, v, segments, replace(masking, **fields))

    return mistake


def of_result(change):
    return lambda right, *call: change(right(*call).clone())


def one_nan(out):
    out[5, 1, 3] = math.nan
    return out


def last_row_zero(out):
    out[-1] = 0
    return out


def raising(right, *call):
    raise RuntimeError("CUDA error: no kernel image\nis available")


MISTAKES = {
    "a wider window": with_masking(window=lambda masking: masking.window and masking.window + 1),
    "no scale": with_masking(scale=1.0),
    "no softcap": with_masking(softcap=None),
    "no causality": with_masking(causal=False),
    "all keys": lambda right, q, k, v, s, m: right(q, k, v, Segments.of(s.lengths, prefixes=s.continued), m),
    "another text's keys": lambda right, q, k, v, *rest: right(q, k.roll(1, 0), v.roll(1, 0), *rest),
    "one NaN": of_result(one_nan),
    "a row unwritten": of_result(last_row_zero),
    "a row missing": of_result(lambda out: out[:-1]),
    "raises": raising,
}


@every_row
def test_a_right_kernel_agrees(kernel, only, caplog):
    only(kernel)
    (found, last) = check(rows())
    assert found.kernel == kernel.NAME and last.kernel == "sdpa"
    assert found.similarity > 0.999 and not found.wrong and not last.wrong
    assert not warnings(caplog) and disabled(kernel.NAME) is None


@pytest.mark.parametrize(("mistake", "kernel"), list(zip(MISTAKES, ROWS * len(MISTAKES), strict=False)))
def test_a_wrong_kernel_is_disabled_with_one_warning(mistake, kernel, only, monkeypatch, caplog):
    only(kernel)
    plant(monkeypatch, kernel, MISTAKES[mistake])
    (found, _) = check(rows())
    assert found.wrong and disabled(kernel.NAME)
    check(rows())
    call = self_check._call((4, 4, 32), {}, {}, CPU, torch.bfloat16, LENGTHS)
    assert kernels.select(*call) is sdpa
    (message,) = warnings(caplog)
    for part in (kernel.NAME, torch.__version__, "cpu", "bfloat16", "millpond env --check", "MILLPOND_SELF_CHECK=0"):
        assert part in message
    assert ("RuntimeError: CUDA error: no kernel image" in message) == (mistake == "raises")


def test_the_last_kernel_serves_on(monkeypatch, caplog):
    monkeypatch.setattr(kernels, "KERNELS", (sdpa,))
    plant(monkeypatch, sdpa, lambda right, q, *rest: right(q, *rest) * (1.0 if q.dtype is torch.float32 else 1.5))
    assert check(rows())[0].wrong
    call = self_check._call((4, 4, 32), {}, {}, CPU, torch.bfloat16, LENGTHS)
    assert kernels.select(*call) is sdpa
    assert "No other kernel" in warnings(caplog)[0]


def row_of(*cases, **fields):
    return Row(
        **{"kernel": "k", "name": "k", "precision": "p", "device": "cpu", "made_of": "1", "cases": lambda: cases}
        | fields
    )


def case_of(found, expected=None):
    expected = np.ones((2, 3)) if expected is None else expected
    return Case(call="c", found=found, expected=lambda: expected)


def raises(error):
    def found():
        raise error

    return found


def test_no_memory_and_known_limits_say_nothing_about_a_kernel(caplog):
    for error in (MemoryError("none"), torch.OutOfMemoryError("none"), KernelError("not such calls")):
        (found,) = check([row_of(case_of(lambda error=error: computed(CPU, raises(error))))])
        assert not found.wrong and found.similarity is None and str(error) in found.finding
    assert disabled("k") is None and not warnings(caplog)


def test_on_a_device_that_computes_nothing_no_kernel_is_to_blame(monkeypatch):
    monkeypatch.setattr(self_check, "_computes", lambda device: False)
    error = torch.AcceleratorError("CUDA error: an illegal memory access")
    row = row_of(case_of(lambda: computed(CPU, raises(error))))
    with pytest.raises(DeviceBrokenError, match="illegal memory access"):
        check([row])
    assert disabled("k") is None


def test_the_least_of_all_cases_counts():
    right, wrong = case_of(lambda: np.ones((2, 3))), case_of(lambda: np.array([[1.0, 1, 1], [1, 1, -1]]))
    found = run(row_of(right, wrong, right))
    assert found.wrong and found.similarity == pytest.approx(1 / 3, abs=1e-5) and found.call.endswith("the least of 3")
    assert run(row_of()) is None


# --- What was right is remembered -------------------------------------------------------------------------------------


class Counted:
    """A row whose result is right, or wrong, and which counts its runs."""

    def __init__(self, value=1.0, **fields):
        self.runs, self.value = 0, value
        self.row = row_of(case_of(self._found), **fields)

    def _found(self):
        self.runs += 1
        return np.full((2, 3), self.value)


def test_a_right_row_runs_once_on_this_machine():
    one, other = Counted(), Counted(kernel="other")
    assert len(check([one.row])) == 1 and check([one.row]) == []
    assert len(check([one.row, other.row])) == 1
    check([one.row, other.row])
    assert (one.runs, other.runs) == (1, 1)
    assert len(check([one.row], remembered=False)) == 1  # asked for, as by millpond env --check MODEL
    assert one.runs == 2


def test_a_wrong_row_is_never_remembered(monkeypatch):
    wrong = Counted(value=0.0)
    for runs in (1, 2):
        monkeypatch.setattr(kernel_check, "_disabled", {})  # another process
        assert check([wrong.row])[0].wrong and wrong.runs == runs


@pytest.mark.parametrize("change", ["processor", "kernels", "instructions"])
def test_another_machine_or_build_is_checked_again(change, monkeypatch):
    counted = Counted()
    check([counted.row])
    right = kernel_check._identity
    monkeypatch.setattr(kernel_check, "_identity", lambda: right() | {change: "another"})
    check([counted.row])
    check([counted.row])
    assert counted.runs == 2


def test_what_other_code_or_versions_gave_is_checked_again():
    for versions in ("1", "2", "1"):
        check([(counted := Counted(made_of=versions)).row])
    assert counted.runs == 0  # both are remembered
    assert len(check([Counted(made_of="3").row])) == 1


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"of": 1}', '{"of": {}, "right": ["k p on cpu, 1"]}', "foreign", "numbers", "\x00"]
)
def test_a_damaged_or_foreign_note_means_check_again(content, folder):
    counted = Counted()
    check([counted.row])
    (note,) = folder.iterdir()
    whole = json.loads(note.read_text())
    changed = {
        "foreign": json.dumps(whole | {"of": whole["of"] | {"processor": "another"}}),
        "numbers": json.dumps(whole | {"right": [1]}),
    }
    note.write_text(changed.get(content, content))
    check([counted.row])
    assert counted.runs == 2
    check([counted.row])
    assert counted.runs == 2 and list(folder.iterdir()) == [note]  # written anew, and no draft is left


def test_the_note_is_in_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel_check.cache_folder() == tmp_path / "millpond"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kernel_check.cache_folder() == tmp_path / ".cache" / "millpond"


# --- The numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "expected", "near"),
    [
        ([[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [1.0, 0.0]], 0.0),
        ([[2.0, 0.0]], [[1.0, 0.0]], 0.8),
        ([[1.0, 0.0], [0.0, 1e-9]], [[1.0, 0.0], [1e-9, 0.0]], 1.0),  # zero but for rounding
        ([[math.nan, 0.0]], [[1.0, 0.0]], 0.0),
        ([[math.inf, 0.0]], [[math.inf, 0.0]], 0.0),
        ([[1.0, 0.0]], [[1.0, 0.0], [1.0, 0.0]], 0.0),
    ],
    ids=["orthogonal", "longer", "rounding", "nan", "infinite", "shape"],
)
def test_similarity(found, expected, near):
    assert similarity(np.array(found), np.array(expected)) == pytest.approx(near, abs=1e-5)
