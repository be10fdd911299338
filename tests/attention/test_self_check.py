"""Each attention kernel beside float32 SDPA: what is noticed, what is not taken for a mistake, and what follows."""

import logging
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from millpond.attention import kernels, matmul_attention, native, sdpa, self_check
from millpond.attention.segments import Segments
from millpond.attention.self_check import (
    LENGTHS,
    BudgetSpentError,
    CallChecks,
    DeviceBrokenError,
    KernelCheck,
    compare,
    device_name,
    is_on,
    reference,
    similarity,
    token_ids,
    warn_once,
)
from millpond.attention.signature import KernelError, Masking

CPU = torch.device("cpu")
PLAIN = Masking(scale=0.25, causal=False)
# Every option that a kernel takes, alone and together with others.
MASKINGS = {
    "plain": PLAIN,
    "causal": Masking(scale=0.25, causal=True),
    "window": Masking(scale=0.25, causal=False, window=128),
    "causal window": Masking(scale=0.25, causal=True, window=5),
    "softcap": Masking(scale=0.25, causal=True, window=4096, softcap=50.0),
    "bias": Masking(scale=0.25, causal=False, bias=torch.zeros(4, 64, 64)),
}


@pytest.fixture(autouse=True)
def whole_table(monkeypatch):
    """No kernel is out of the table, nothing was compared and nobody was warned."""
    monkeypatch.setattr(kernels, "_withdrawn", {})
    monkeypatch.setattr(self_check, "_told", set())
    monkeypatch.setattr(self_check, "_probed", set())


@pytest.fixture
def only(monkeypatch):
    """Lets one kernel of the table, and the last one, serve."""

    def only(kernel):
        monkeypatch.setattr(kernels, "KERNELS", (kernel, sdpa))

    return only


def call(masking=PLAIN, *, dtype=torch.bfloat16, heads=(4, 2, 16), **options):
    random = torch.Generator().manual_seed(3)
    states = (
        torch.randn((sum(LENGTHS), count, heads[2]), generator=random).to(dtype) for count in (*heads[:2], heads[1])
    )
    bias = None if masking.bias is None else masking.bias.to(dtype)
    return (*states, Segments.of(LENGTHS, **options), replace(masking, bias=bias))


def watched(*calls, seconds=None):
    checks = CallChecks(seconds=seconds)
    with checks.watching():
        results = [kernels.attend(*one) for one in calls]
    return checks.results, results


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def served():
    return native if native.unavailable() is None else matmul_attention


ROWS = [native, matmul_attention]
every_row = pytest.mark.parametrize("kernel", ROWS, ids=lambda kernel: kernel.NAME)


def skip_if_absent(kernel):
    if kernel.unavailable() is not None:
        pytest.skip(kernel.unavailable())


@every_row
@pytest.mark.parametrize("name", MASKINGS)
@pytest.mark.parametrize("keys", [None, (1, 1, 5, 20)], ids=["all-keys", "limited-keys"])
def test_a_right_kernel_agrees(kernel, name, keys, only, caplog):
    skip_if_absent(kernel)
    only(kernel)
    found, _ = watched(call(MASKINGS[name], keys=keys))
    assert len(found) >= 2  # the call, and random numbers in its place
    assert all(check.similarity > 0.9995 and not check.wrong for check in found), found
    assert kernel.NAME in {check.kernel for check in found}
    assert not warnings(caplog) and kernels.withdrawn(kernel) is None


def plant(monkeypatch, kernel, mistake):
    """Let a kernel of the table make a mistake: a function of its right result and the call."""
    right = kernel.attend

    def attend(query, key, value, segments, masking):
        return mistake(right, query, key, value, segments, masking)

    monkeypatch.setattr(kernel, "attend", attend)


def wider_window(right, q, k, v, segments, masking):
    window = None if masking.window is None else masking.window + 1
    return right(q, k, v, segments, replace(masking, window=window))


def no_scale(right, q, k, v, segments, masking):
    return right(q, k, v, segments, replace(masking, scale=1.0))


def no_cap(right, q, k, v, segments, masking):
    return right(q, k, v, segments, replace(masking, softcap=None))


def not_causal(right, q, k, v, segments, masking):
    return right(q, k, v, segments, replace(masking, causal=False))


def all_keys(right, q, k, v, segments, masking):
    return right(q, k, v, Segments.of(segments.lengths), masking)


def two_heads_exchanged(right, *call):
    out = right(*call)
    return out[:, [1, 0, *range(2, out.shape[1])]]


def another_texts_keys(right, q, k, v, segments, masking):
    return right(q, k.roll(1, 0), v.roll(1, 0), segments, masking)


def one_number_missing(right, *call):
    out = right(*call).clone()
    out[5, 1, 3] = math.nan
    return out


def last_row_unwritten(right, *call):
    out = right(*call).clone()
    out[-1] = 0
    return out


def too_large(right, *call):
    return right(*call) * 1.06


def row_missing(right, *call):
    return right(*call)[:-1]


def raising(right, *call):
    raise RuntimeError("CUDA error: no kernel image\nis available")


MISTAKES = {
    "window": (wider_window, "window"),
    "narrow-window": (wider_window, "causal window"),
    "scale": (no_scale, "plain"),
    "softcap": (no_cap, "softcap"),
    "causality": (not_causal, "causal"),
    "heads": (two_heads_exchanged, "plain"),
    "segments": (another_texts_keys, "plain"),
    "nan": (one_number_missing, "causal"),
    "unwritten": (last_row_unwritten, "plain"),
    "size": (too_large, "plain"),
    "shape": (row_missing, "plain"),
    "bias": (lambda right, q, k, v, s, m: right(q, k, v, s, replace(m, bias=None)), "bias"),
    "raises": (raising, "plain"),
}


@every_row
@pytest.mark.parametrize(("mistake", "name"), MISTAKES.values(), ids=MISTAKES)
def test_a_wrong_kernel_is_taken_out_with_one_warning(kernel, mistake, name, only, monkeypatch, caplog):
    skip_if_absent(kernel)
    only(kernel)
    plant(monkeypatch, kernel, mistake)
    calls = [call(MASKINGS[name]) for _ in range(3)]
    assert kernels.select(*calls[0]) is kernel
    found, results = watched(*calls)
    assert any(check.wrong for check in found)
    assert kernels.withdrawn(kernel) and kernels.select(*calls[0]) is sdpa
    for one, result in zip(calls[1:], results[1:], strict=True):
        assert torch.equal(result, sdpa.attend(*one))
    (message,) = warnings(caplog)
    for part in (
        kernel.NAME,
        torch.__version__,
        "cpu",
        "4 heads of 16",
        "millpond env --check",
        "MILLPOND_SELF_CHECK=0",
    ):
        assert part in message
    assert ("RuntimeError: CUDA error: no kernel image" in message) == (mistake is raising)


@every_row
def test_limited_keys_that_are_ignored_are_noticed(kernel, only, monkeypatch, caplog):
    skip_if_absent(kernel)
    only(kernel)
    plant(monkeypatch, kernel, all_keys)
    watched(call())
    assert not warnings(caplog)  # nothing that such a model does is wrong
    watched(call(keys=(1, 1, 5, 20)))
    assert len(warnings(caplog)) == 1 and kernels.withdrawn(kernel)


def test_limited_keys_and_shared_prefixes_are_probed_too(only):
    only(matmul_attention)
    found, _ = watched(call(MASKINGS["causal"], keys=(1, 1, 5, 20)))
    assert sum("limited keys" in check.call for check in found) == 2  # the call, and random numbers
    assert sum("shared prefix" in check.call for check in found) == 1
    assert len(found) == 4


def test_the_next_kernel_serves_and_is_compared_too(monkeypatch, caplog):
    first = served()
    for kernel in {first, matmul_attention}:
        plant(monkeypatch, kernel, no_scale)
    _, (result,) = watched(call())
    assert kernels.select(*call()) is sdpa
    assert {kernel for kernel in ROWS if kernels.withdrawn(kernel)} == {first, matmul_attention}
    assert torch.equal(result, sdpa.attend(*call()))
    assert len(warnings(caplog)) == len({first, matmul_attention})


def test_the_last_kernel_stays_and_its_result_is_replaced(only, monkeypatch, caplog):
    monkeypatch.setattr(kernels, "KERNELS", (sdpa,))
    plant(monkeypatch, sdpa, lambda right, q, *rest: right(q, *rest) * (1.0 if q.dtype is torch.float32 else 1.5))
    _, (result,) = watched(call())
    assert similarity(result.float(), reference(*call())) > 0.9999
    assert not kernels.withdraw(sdpa, "wrong") and kernels.withdrawn(sdpa) is None
    (message,) = warnings(caplog)
    assert "sdpa" in message and "No other kernel" in message


def test_when_every_kernel_raises_none_is_to_blame(monkeypatch):
    monkeypatch.setattr(kernels, "KERNELS", (sdpa,))

    def broken(right, q, *rest):
        if q.dtype is torch.float32:
            return right(q, *rest)
        raise RuntimeError("the device is lost")

    plant(monkeypatch, sdpa, broken)
    with pytest.raises(DeviceBrokenError, match="lost"):
        watched(call())


def test_on_a_device_that_computes_nothing_any_more_no_kernel_is_to_blame(only, monkeypatch, caplog):
    only(matmul_attention)
    ones = torch.ones

    def lost(right, q, *rest):
        def fail(*size, device=None, **options):
            if device is None:
                return ones(*size, **options)
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(torch, "ones", fail)
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    plant(monkeypatch, matmul_attention, lost)
    with pytest.raises(DeviceBrokenError, match="illegal memory access"):
        watched(call())
    assert kernels.withdrawn(matmul_attention) is None and warnings(caplog) == []


def test_a_kernel_that_knows_its_limits_is_followed_by_the_next(only, monkeypatch, caplog):
    """It raises KernelError, and fits such calls no more; it is not wrong."""
    only(matmul_attention)

    def limited(*call):
        monkeypatch.setattr(matmul_attention, "fits", lambda *call: False)
        raise KernelError("matmul cannot serve such calls here")

    monkeypatch.setattr(matmul_attention, "attend", limited)
    found, (result,) = watched(call())
    assert torch.equal(result, sdpa.attend(*call())) and not any(check.wrong for check in found)
    assert warnings(caplog) == ["matmul cannot serve such calls here"] and kernels.withdrawn(matmul_attention) is None


def test_no_memory_says_nothing_about_a_kernel(only, monkeypatch, caplog):
    only(matmul_attention)
    for error in (MemoryError, torch.OutOfMemoryError):

        def full(*call, error=error):
            raise error("none left")

        monkeypatch.setattr(matmul_attention, "attend", full)
        with pytest.raises(error):
            watched(call())
    assert kernels.withdrawn(matmul_attention) is None and not warnings(caplog)


def test_a_kind_of_call_is_probed_once_in_a_process_and_a_forward_each_time(only):
    only(matmul_attention)
    first, _ = watched(call(), call())
    again, _ = watched(call())
    other, _ = watched(call(MASKINGS["causal"]))
    assert [len(found) for found in (first, again)] == [3, 1]
    assert len(other) >= 2


def test_the_probe_is_repeated_for_another_function(only, monkeypatch):
    only(matmul_attention)
    watched(call(MASKINGS["window"]))
    plant(monkeypatch, matmul_attention, wider_window)
    watched(call(MASKINGS["window"]))
    assert kernels.withdrawn(matmul_attention)


def test_states_that_overflow_prove_nothing(only, caplog):
    only(matmul_attention)
    query, *rest = call()
    query[3] = math.inf
    found, _ = watched((query, *rest))
    assert all(check.similarity > 0.99 for check in found)  # of random numbers only
    assert not warnings(caplog)


def test_after_its_time_no_call_is_compared(only):
    only(matmul_attention)
    checks = CallChecks(seconds=0.0)
    with checks.watching():
        kernels.attend(*call())  # one is, in any case
        with pytest.raises(BudgetSpentError):
            kernels.attend(*call())
    assert checks.results
    assert kernels.attend(*call()).shape == (sum(LENGTHS), 4, 16)  # nothing watches any more


def test_other_threads_are_not_watched(only, monkeypatch):
    only(matmul_attention)
    checks = CallChecks()
    with checks.watching(), ThreadPoolExecutor(1) as thread:
        thread.submit(kernels.attend, *call()).result()
    assert not checks.results


def test_threads_that_find_the_same_mistake_warn_once(only, monkeypatch, caplog):
    only(matmul_attention)
    together = threading.Barrier(8)

    def mistake(right, q, *rest):
        if not together.broken:
            together.wait(timeout=20)
        return right(q, *rest) * 2

    plant(monkeypatch, matmul_attention, mistake)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: watched(call()), range(8)))
    assert len(warnings(caplog)) == 1 and kernels.withdrawn(matmul_attention)


def test_calls_of_other_threads_go_on_while_a_kernel_is_taken_out(only):
    only(matmul_attention)
    stop = threading.Event()
    expected = matmul_attention.attend(*call()).float()

    def attend():
        least = 1.0
        while not stop.is_set():
            least = min(least, similarity(kernels.attend(*call()).float(), expected))
        return least

    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(attend) for _ in range(2)]
        assert kernels.withdraw(matmul_attention, "wrong")
        assert not kernels.withdraw(matmul_attention, "wrong again")
        stop.set()
        assert all(thread.result() > 0.999 for thread in running)
    assert kernels.withdrawn(matmul_attention) == "wrong"


def test_float32_on_a_cpu_is_not_compared_with_itself(only):
    only(matmul_attention)
    found, (result,) = watched(call(dtype=torch.float32))
    assert not found and torch.equal(result, sdpa.attend(*call(dtype=torch.float32)))


def test_a_wide_window_in_float32_is_compared_where_it_would_be_narrow(only, monkeypatch):
    """The texts of the check are shorter than the window, so that SDPA serves them; longer ones would not be."""
    only(matmul_attention)
    plant(monkeypatch, matmul_attention, wider_window)
    watched(call(MASKINGS["window"], dtype=torch.float32))
    assert kernels.withdrawn(matmul_attention)


@pytest.mark.parametrize(
    ("found", "expected", "near"),
    [
        ([[1.0, 0.0]], [[1.0, 0.0]], 1.0),
        ([[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [1.0, 0.0]], 0.0),
        ([[2.0, 0.0]], [[1.0, 0.0]], 0.8),
        ([[-1.0, 0.0]], [[1.0, 0.0]], -1.0),
        ([[0.0, 0.0]], [[0.0, 0.0]], 1.0),
        ([[1.0, 0.0], [0.0, 1e-9]], [[1.0, 0.0], [1e-9, 0.0]], 1.0),  # zero but for rounding
        ([[0.0, 0.0]], [[1.0, 0.0]], 0.0),
        ([[math.nan, 0.0]], [[1.0, 0.0]], 0.0),
        ([[math.inf, 0.0]], [[math.inf, 0.0]], 0.0),
        ([[1.0, 0.0]], [[1.0, 0.0], [1.0, 0.0]], 0.0),
    ],
    ids=["equal", "orthogonal", "longer", "opposite", "zero", "rounding", "missing", "nan", "infinite", "shape"],
)
def test_similarity(found, expected, near):
    assert similarity(torch.tensor(found), torch.tensor(expected)) == pytest.approx(near, abs=1e-5)


def test_compare_looks_at_each_head_if_told_to():
    """An error of a small head is hidden by a large one."""
    q, k, v, segments, masking = call(dtype=torch.float32)
    v[:, 0] *= 100
    right = reference(q, k, v, segments, masking)
    wrong = right.clone()
    wrong[:, 3] = 0
    assert compare(sdpa, q, k, v, segments, masking, expected=wrong)[0].similarity > 0.999
    assert compare(sdpa, q, k, v, segments, masking, expected=wrong, by_head=True)[0].wrong


@pytest.mark.parametrize(("value", "on"), [(None, True), ("", True), ("1", True), ("0", False), (" 0 ", False)])
def test_a_variable_leaves_it_out(value, on, monkeypatch):
    monkeypatch.delenv("MILLPOND_SELF_CHECK", raising=False)
    if value is not None:
        monkeypatch.setenv("MILLPOND_SELF_CHECK", value)
    assert is_on() == on


def test_a_finding_in_words(caplog):
    ran = KernelCheck(kernel="native", call="bfloat16", similarity=0.5)
    assert ran.wrong and "0.5000" in ran.finding
    assert "agrees" in KernelCheck(kernel="native", call="", similarity=0.9995).finding
    absent = KernelCheck(kernel="varlen", call="", obstacle="no CUDA device")
    assert not absent.wrong and absent.finding == "did not run (no CUDA device)"
    assert KernelCheck(kernel="varlen", call="", similarity=math.nan).wrong
    with caplog.at_level(logging.INFO, "millpond"):
        for _ in range(2):
            warn_once("the kernel", ran, device=device_name(CPU), consequence="It is out.")
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_token_ids_are_of_the_vocabulary():
    assert set(token_ids(100, 7).tolist()) == set(range(7))
    assert not (token_ids(84, 30000) == token_ids(84, 30000, start=1000)).any()
    assert token_ids(3, 1).tolist() == [0, 0, 0]
