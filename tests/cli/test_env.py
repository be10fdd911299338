"""``millpond env --check``: the table of kernels, of the machine and of a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.conftest import Run
from tests.tiny import write_checkpoint

import millpond
from millpond.backends import kernel_check
from millpond.native import library

pytestmark = pytest.mark.contract  # every kernel of the machine is compared

BFLOAT16 = ("--engine", "dtype=bfloat16", "--engine", "device=cpu")
HEADER = ["kernel", "result", "similarity", "ms", "call"]


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernel_check, "_disabled", {})
    monkeypatch.setattr(kernel_check, "cache_folder", lambda: tmp_path / "cache")


def damage(monkeypatch: pytest.MonkeyPatch) -> None:
    from millpond.backends.torch.attention import matmul_attention

    right = matmul_attention.attend
    monkeypatch.setattr(matmul_attention, "attend", lambda query, *rest: right(query, *rest).roll(1, 1))


def lines_of(out: str) -> list[list[str]]:
    """The lines of the table."""
    lines = [line.split() for line in out.splitlines()]
    return lines[lines.index(HEADER) + 1 :]


@pytest.mark.torch
def test_every_kernel_of_the_machine_has_a_line(run: Run):
    import torch

    from millpond.backends.torch.attention import kernels

    result = run("env", "--check")
    assert result.code == 0, result.err
    lines = lines_of(result.out)
    assert "packages" in result.out.split("kernel  ")[0]
    assert {kernel.NAME for kernel in kernels.KERNELS} <= {line[0] for line in lines}
    assert not any("WRONG" in line for line in lines)
    for line in lines:
        if line[1] == "right":
            assert float(line[2]) > 0.997 and float(line[3]) >= 0
    if not torch.cuda.is_available():
        (varlen,) = [line for line in lines if line[0] == "varlen"]
        assert varlen[1:3] == ["not", "run"] and varlen[-3:] == ["no", "CUDA", "device"]
    (native,) = {line[0] for line in lines if line[0] == "encoder"}
    assert any(line[1] == library.isa() or library.isa() is None for line in lines if line[0] == native)


@pytest.mark.torch
def test_a_wrong_kernel_is_named_and_fails_the_command(run: Run, monkeypatch: pytest.MonkeyPatch):
    damage(monkeypatch)
    result = run("env", "--check")
    assert result.code == 1
    wrong = [line for line in lines_of(result.out) if "WRONG" in line]
    assert wrong and {line[0] for line in wrong} == {"matmul"}


@pytest.mark.torch
def test_a_device_that_breaks_is_a_line_and_no_traceback(run: Run, monkeypatch: pytest.MonkeyPatch):
    import torch

    from millpond.backends.torch.attention import matmul_attention, self_check

    def lost(*call):
        monkeypatch.setattr(self_check, "_computes", lambda device: False)
        raise torch.AcceleratorError("CUDA error: unspecified launch failure\nand advice in more lines")

    monkeypatch.setattr(matmul_attention, "attend", lost)
    result = run("env", "--check")
    assert result.code == 1 and "Traceback" not in result.err
    lines = [line for line in lines_of(result.out) if line[0] == "matmul"]
    assert lines and all("computes nothing any more" in " ".join(line) for line in lines)
    assert "advice" not in result.out


@pytest.mark.torch
def test_the_kernels_that_a_model_may_use(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_checkpoint(tmp_path / "model")
    monkeypatch.setenv("MILLPOND_SELF_CHECK", "0")  # which is about loading
    result = run("env", "--check", folder, *BFLOAT16, "--engine", "backend=torch", "--format", "json")
    assert result.code == 0, result.err
    printed = json.loads(result.out)
    checks = {check["kernel"]: check for check in printed["checks"]}
    assert checks["matmul"]["similarity"] > 0.999 and not checks["matmul"]["wrong"]
    assert checks["triton"]["similarity"] is None and checks["triton"]["obstacle"]
    assert "torch" in printed["environment"]["packages"]


@pytest.mark.torch
def test_variables_are_named_and_their_values_are_never_printed(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("QDRANT_API_KEY", "s3cret-of-qdrant")
    monkeypatch.setenv("HF_TOKEN", "s3cret-of-the-hub")
    monkeypatch.setenv("UNRELATED", "nothing")
    monkeypatch.setattr("millpond.backends.torch.attention.varlen.unavailable", lambda: "there is a reason")
    out = run("env", code=0).out
    assert "--check" in run("env", "some/model", code=2).err
    assert "QDRANT_API_KEY" in out and "HF_TOKEN" in out and "UNRELATED" not in out and "s3cret" not in out
    assert f"millpond {millpond.__version__}" in out and str(Path.home()) not in out
    lines = [line for line in out.splitlines() if line.startswith("attention ")]
    assert [line.split()[1] for line in lines] == ["native", "matmul", "triton", "varlen", "sdpa"]
    assert lines[3].endswith("CUDA in half precision: there is a reason")
    assert lines[-1].endswith("for every other call: can run")
