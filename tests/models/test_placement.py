"""A GPU that this torch cannot use is no reason to compute on the CPU in silence."""

import logging

import pytest
import torch

from millpond.cli.commands.env import _accelerator
from millpond.models import placement
from millpond.models.placement import resolve_device, unusable_gpu

OLD = "The NVIDIA driver on your system is too old (found version 11040)."
CPU = torch.device("cpu")


@pytest.fixture
def machine(monkeypatch):
    """Pretends a machine whose torch finds no CUDA."""

    def pretend(*, cuda="12.8", devices=1, error=None):
        def init():
            if error is not None:
                raise error

        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: False)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)

    placement._warn_of_unusable_gpu.cache_clear()
    yield pretend
    placement._warn_of_unusable_gpu.cache_clear()


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_old_driver_is_named_once(machine, caplog):
    machine(error=RuntimeError(f"{OLD}\nPlease update it."))
    for _ in range(3):
        assert resolve_device("auto") == CPU
    (message,) = warnings(caplog)
    for part in (OLD.rstrip("."), torch.__version__, "CUDA 12.8", 'device="cpu"', "driver"):
        assert part in message
    assert _accelerator(CPU) == f"none that can be used: {OLD.rstrip('.')}"


@pytest.mark.parametrize("error", [AssertionError(), None], ids=["no-words", "no-error"])
def test_a_gpu_that_cannot_be_used_for_no_known_reason_is_named_too(error, machine, caplog):
    machine(error=error)
    assert resolve_device("auto") == CPU
    assert len(warnings(caplog)) == 1 and unusable_gpu()


@pytest.mark.parametrize("absent", [{"cuda": None}, {"devices": 0}], ids=["torch-for-cpus", "no-gpu"])
def test_a_machine_without_a_gpu_or_a_torch_for_cpus_is_not_warned(absent, machine, caplog):
    machine(error=RuntimeError(OLD), **absent)
    assert resolve_device("auto") == CPU and unusable_gpu() is None
    assert not warnings(caplog)
    assert _accelerator(CPU) == "none"


def test_who_asks_for_the_cpu_is_not_warned(machine, caplog):
    machine(error=RuntimeError(OLD))
    assert resolve_device("cpu") == CPU
    assert not warnings(caplog)


def test_a_gpu_that_works_is_no_unusable_one(machine, monkeypatch):
    machine(error=RuntimeError(OLD))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert unusable_gpu() is None
