"""The interpreter's switch interval: shortened while an engine drives a device with streams, and only then."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.recording import Recording
from tests.tiny import TEXTS, write_checkpoint

from millpond import Engine
from millpond.engine import loading
from millpond.engine.execute.switch_interval import VARIABLE, shorten_switch_interval
from millpond.errors import InvalidRequestError
from tests import recording

PYTHONS_OWN = pytest.approx(0.005)
SHORT = pytest.approx(0.0002)


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Python's own interval, before and after."""
    monkeypatch.delenv(VARIABLE, raising=False)
    assert sys.getswitchinterval() == PYTHONS_OWN
    yield
    sys.setswitchinterval(0.005)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("interval") / "model", "bert")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    recording.pretend_varlen(monkeypatch)
    monkeypatch.setattr(loading, "_backend", lambda device: Recording())


def test_it_is_short_until_the_last_user_is_done():
    first, second = shorten_switch_interval(), shorten_switch_interval()
    assert sys.getswitchinterval() == SHORT
    first()
    first()  # again: it counts once
    assert sys.getswitchinterval() == SHORT
    second()
    assert sys.getswitchinterval() == PYTHONS_OWN
    third = shorten_switch_interval()
    assert sys.getswitchinterval() == SHORT
    third()
    assert sys.getswitchinterval() == PYTHONS_OWN


@pytest.mark.parametrize("seconds", [0.001, 0.05], ids=str)
def test_an_interval_that_the_program_has_set_stays(seconds):
    sys.setswitchinterval(seconds)
    restore = shorten_switch_interval()
    assert sys.getswitchinterval() == pytest.approx(seconds)
    restore()
    assert sys.getswitchinterval() == pytest.approx(seconds)


def test_an_interval_that_the_program_sets_later_stays():
    restore = shorten_switch_interval()
    sys.setswitchinterval(0.001)
    other = shorten_switch_interval()
    assert sys.getswitchinterval() == pytest.approx(0.001)
    other()
    restore()
    assert sys.getswitchinterval() == pytest.approx(0.001)


@pytest.mark.parametrize(("text", "seconds"), [("0.001", 0.001), ("0", 0.005), ("", 0.0002), ("0.005", 0.005)])
def test_the_environment_chooses_the_interval(text, seconds, monkeypatch):
    monkeypatch.setenv(VARIABLE, text)
    restore = shorten_switch_interval()
    assert sys.getswitchinterval() == pytest.approx(seconds)
    restore()
    assert sys.getswitchinterval() == PYTHONS_OWN


@pytest.mark.parametrize("text", ["fast", "-1", "0.1", "nan", "1e-9", "inf"])
def test_another_value_is_refused_by_name(text, monkeypatch):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(InvalidRequestError, match=f"{VARIABLE}='{text}' must be a number of seconds"):
        shorten_switch_interval()
    assert sys.getswitchinterval() == PYTHONS_OWN


def test_threads_that_begin_and_end_at_once_leave_pythons_own():
    def use() -> None:
        for _ in range(200):
            shorten_switch_interval()()

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sys.getswitchinterval() == PYTHONS_OWN


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_has_pythons_own():
    restore = shorten_switch_interval()
    pid = os.fork()
    if pid == 0:  # pytest must not go on here
        own = abs(sys.getswitchinterval() - 0.005) < 1e-9
        restore()  # of an engine of the parent
        again = shorten_switch_interval()
        short = abs(sys.getswitchinterval() - 0.0002) < 1e-9
        again()
        os._exit(0 if own and short and abs(sys.getswitchinterval() - 0.005) < 1e-9 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert sys.getswitchinterval() == SHORT
    restore()


def test_engines_of_a_device_with_streams_share_it(folder, streams):
    with Engine(folder, device="cpu", dtype="float32") as engine:
        assert sys.getswitchinterval() == SHORT
        with Engine(folder, device="cpu", dtype="float32"):
            pass
        assert sys.getswitchinterval() == SHORT
        assert len(engine.embed(TEXTS)) == len(TEXTS)
    assert sys.getswitchinterval() == PYTHONS_OWN
    engine.close()
    assert sys.getswitchinterval() == PYTHONS_OWN


def test_an_engine_that_was_dropped_restores_it(folder, streams):
    engine = Engine(folder, device="cpu", dtype="float32")
    assert sys.getswitchinterval() == SHORT
    del engine
    gc.collect()
    assert sys.getswitchinterval() == PYTHONS_OWN


def test_an_engine_on_a_cpu_leaves_it(folder):
    with Engine(folder, device="cpu", dtype="float32") as engine:
        assert len(engine.embed(TEXTS)) == len(TEXTS) and sys.getswitchinterval() == PYTHONS_OWN


def test_an_engine_refuses_an_interval_that_is_none(folder, streams, monkeypatch):
    monkeypatch.setenv(VARIABLE, "often")
    before = threading.active_count()
    with pytest.raises(InvalidRequestError, match=VARIABLE):
        Engine(folder, device="cpu", dtype="float32")
    assert threading.active_count() == before and not torch.is_inference_mode_enabled()
