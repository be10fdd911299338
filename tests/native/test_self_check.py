"""The self-check of the native backend: planted mistakes are noticed, and a wrong encoder serves no model."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import replace

import numpy as np
import pytest
from tests.tiny import TEXTS, write_checkpoint

from millpond import Engine
from millpond.backends import kernel_check
from millpond.backends.kernel_check import run
from millpond.backends.native import families, kernels, self_check, structs
from millpond.backends.native.kernels import encoder_name, kernels_of
from millpond.backends.native.packing.weight_packer import NotSupported
from millpond.backends.native.self_check import check_encoder, encoder_rows
from millpond.engine.loading import describe
from millpond.native import library
from millpond.values.config import EngineConfig

pytestmark = [
    pytest.mark.skipif(library.kernel_table() is None, reason="no compiled kernels"),
    pytest.mark.contract,
]
SIZE = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128}
DTYPES = [dtype for dtype in ("float32", "bfloat16") if kernels_of(dtype) is not None]
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.setattr(kernel_check, "_disabled", {})
    monkeypatch.setattr(kernel_check, "cache_folder", lambda: tmp_path / "cache")


@every_dtype
@pytest.mark.parametrize("int8", ["none", "feeds", "all"])
def test_a_right_encoder_agrees(dtype, int8):
    for row in encoder_rows(dtype, int8):
        found = run(row)
        # Far from the limit, so that no processor's rounding comes near it.
        assert 1 - found.similarity < (1 - row.least) / 2 and not found.wrong, found


class Damage:
    """Kernels whose entries do something wrong; used in place of the right ones, by every plan that is built."""

    def __init__(self, monkeypatch, **entries):
        self.calls = 0

        def damaged(*args, **options):
            kernels = kernels_of(*args, **options)
            if kernels is None:
                return None
            return replace(kernels, **{name: self._wrapped(getattr(kernels, name), entries[name]) for name in entries})

        for module in (families, self_check):  # of models, and of the check
            monkeypatch.setattr(module, "kernels_of", damaged)

    def _wrapped(self, entry, mistake):
        def wrapped(address):
            self.calls += 1
            return mistake(entry, address)

        return wrapped


def with_call(**fields):
    """The entry, called with other fields of the call's struct."""

    def mistake(entry, address):
        call = structs.EncodeCall.from_buffer_copy(structs.EncodeCall.from_address(address))
        for name, value in fields.items():
            setattr(call, name, value)
        return entry(ctypes.addressof(call))

    return mistake


def with_steps(change):
    """The entry, called with the steps that ``change`` makes of a model's."""

    def mistake(entry, address):
        call = structs.EncodeCall.from_buffer_copy(structs.EncodeCall.from_address(address))
        model = structs.Model.from_buffer_copy(call.model.contents)
        copies = (structs.Step * model.count)(*(model.steps[i] for i in range(model.count)))
        kept = change(list(copies))
        steps = (structs.Step * len(kept))(*kept)
        model.steps, model.count = steps, len(kept)
        call.model = ctypes.pointer(model)
        return entry(ctypes.addressof(call))

    return mistake


def without(kind):
    return with_steps(lambda steps: [step for step in steps if step.kind != kind])


def changed(kind, **fields):
    def change(steps):
        for step in steps:
            for name, value in fields.items() if step.kind == kind else ():
                setattr(step, name, value)
        return steps

    return with_steps(change)


def spoiled(*place, value):
    def mistake(entry, address):
        entry(address)
        call = structs.EncodeCall.from_address(address)
        bounds = np.ctypeslib.as_array(ctypes.cast(call.bounds, ctypes.POINTER(ctypes.c_int32)), (call.texts + 1,))
        rows = int(bounds[-1]) if call.reading == structs.ALL_ROWS else call.texts
        numbers = ctypes.cast(call.out, ctypes.POINTER(ctypes.c_float))
        np.ctypeslib.as_array(numbers, (rows, call.model.contents.output))[place] = value
        return 0

    return mistake


def mean_is_first(entry, address):
    call = structs.EncodeCall.from_address(address)
    fields = {"reading": structs.FIRST_ROW} if call.reading == structs.MEAN_ROW else {}
    return with_call(**fields)(entry, address)


MISTAKES = {
    "no-feed": without(structs.FEED),
    "no-rotation": without(structs.HEADS),
    "scale": changed(structs.ATTENTION, scale=1.0),
    "window": changed(structs.ATTENTION, before=1 << 40, after=1 << 40),
    "causality": changed(structs.ATTENTION, after=1 << 40),
    "softcap": changed(structs.ATTENTION, softcap=0.0),
    "distances": changed(structs.ATTENTION, distances=None),
    "distances-as-keys": changed(structs.ATTENTION, key_columns=None),
    "distances-as-queries": changed(structs.ATTENTION, query_columns=None),
    "kept-embeddings": with_steps(
        lambda steps: [replaced_target(step) if step.kind == structs.NORM else step for step in steps]
    ),
    "offset": with_call(offset=0),
    "adapters": with_call(adapters=None),
    "keys": with_call(keys=None),
    "types": with_call(types=None),
    "mean": mean_is_first,
    "unwritten": spoiled(-1, value=0.0),
    "nan": spoiled(0, 1, value=np.nan),
}


def replaced_target(step):
    """A norm that does not keep its result in the sums."""
    step.target = 0 if step.target == 1 else step.target
    return step


@every_dtype
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_encoder_is_noticed(mistake, dtype, monkeypatch):
    damage = Damage(monkeypatch, encode=MISTAKES[mistake])
    (row,) = encoder_rows(dtype, "none")
    assert run(row).wrong and damage.calls


@pytest.mark.parametrize("int8", ["feeds", "all"])
def test_wrong_products_in_eight_bits_are_noticed(int8, monkeypatch):
    def dropped(entry, address):
        """A third of each weight."""
        call = structs.PackRowsCall.from_address(address)
        entry(address)
        ctypes.memset(call.units, 0, call.out * call.in_ // 3)
        return 0

    damage = Damage(monkeypatch, pack_int8=dropped)
    for row in encoder_rows("float32", int8):
        assert run(row).wrong and damage.calls


def test_a_right_encoder_is_compared_once_and_a_wrong_one_serves_no_model(monkeypatch, caplog, tmp_path):
    assert [found.wrong for found in check_encoder("float32", "none")] == [False]
    assert check_encoder("float32", "none") == []  # remembered
    assert [found.wrong for found in check_encoder("float32", "none", remembered=False)] == [False]
    assert not caplog.records
    Damage(monkeypatch, encode=MISTAKES["scale"])
    monkeypatch.setattr(kernel_check, "cache_folder", lambda: tmp_path / "another")
    assert [found.wrong for found in check_encoder("float32", "none")] == [True]
    assert check_encoder("float32", "none") == []  # it serves nothing any more
    with pytest.raises(NotSupported, match="gives other results here than float32"):
        families.build_encoder(None, None, dtype="float32")
    assert kernel_check.disabled(encoder_name("float32", "none"))
    (message,) = warnings(caplog)
    for part in (f"encoder {library.isa()}", "float32", "millpond[torch]", "env --check", "MILLPOND_SELF_CHECK=0"):
        assert part in message


def test_a_comparison_that_cannot_run_disables_nothing(monkeypatch, caplog):
    monkeypatch.setattr(self_check, "formulas", lambda *call: 1 / 0)
    assert check_encoder("float32", "none") == []
    assert not kernel_check._disabled and not caplog.records


def embedded(folder):
    """The backend that "auto" takes, and what it computes."""
    with Engine(folder, device="cpu", dtype="float32") as engine:
        return engine._replicas.runner.model.backend, engine.embed(TEXTS).embeddings


def warnings(caplog):
    return [each.getMessage() for each in caplog.records if "kernel" in each.name and each.levelno >= logging.WARNING]


@pytest.mark.torch
def test_an_engine_with_a_wrong_encoder_runs_in_torch(monkeypatch, tmp_path, caplog):
    folder = write_checkpoint(tmp_path / "model", config=SIZE)
    backend, right = embedded(folder)
    assert backend == "native"
    Damage(monkeypatch, encode=MISTAKES["scale"])
    assert embedded(folder)[0] == "native"  # what was right before is not compared again
    monkeypatch.setattr(kernel_check, "cache_folder", lambda: tmp_path / "another")
    for _ in range(2):
        backend, rows = embedded(folder)
        assert backend == "torch"
        np.testing.assert_allclose(rows, right, atol=1e-6)
    (message,) = warnings(caplog)
    for part in (f"encoder {library.isa()}", "float32", "env --check"):
        assert part in message


def test_auto_is_int8_where_the_check_finds_it_right(monkeypatch, tmp_path):
    folder = write_checkpoint(tmp_path / "model", config=SIZE)

    def fingerprint(quantization):
        with Engine(folder, dtype="float32", device="cpu", quantization=quantization) as engine:
            return engine.spec.fingerprint

    plain, int8 = fingerprint(None), fingerprint("int8")
    assert fingerprint("auto") == int8 != plain
    config = EngineConfig(model=str(folder), dtype="float32", device="cpu", quantization="auto")
    assert describe(config).fingerprint == int8
    monkeypatch.setattr(kernel_check, "_disabled", {encoder_name("float32", "feeds"): "differs"})
    assert fingerprint("auto") == describe(config).fingerprint == plain


def test_without_the_check_a_wrong_encoder_serves(monkeypatch, tmp_path, caplog):
    folder = write_checkpoint(tmp_path / "model", config=SIZE)
    _, right = embedded(folder)
    monkeypatch.setattr(kernel_check, "cache_folder", lambda: tmp_path / "another")
    Damage(monkeypatch, encode=MISTAKES["scale"])
    monkeypatch.setenv("MILLPOND_SELF_CHECK", "0")
    backend, rows = embedded(folder)
    assert backend == "native" and np.abs(rows - right).max() > 1e-3
    assert not warnings(caplog)


@pytest.mark.parametrize(
    ("highest", "dtype", "reason"),
    [
        ("avx2", "float32", None),
        ("avx2", "bfloat16", 'no kernels for bfloat16; dtype="float32" has them'),
    ],
)
def test_what_a_processor_lacks_is_one_sentence(highest, dtype, reason, monkeypatch):
    if highest not in library.ISAS or library.isa(highest) != highest:
        pytest.skip(f"no {highest}")
    monkeypatch.setattr(kernels, "kernels_of", lambda *call, **options: kernels_of(*call, highest, **options))
    found = kernels.missing_kernels(dtype)
    assert found is None if reason is None else reason in found


def test_a_processor_without_any_kernels_is_one_sentence(monkeypatch):
    monkeypatch.setattr(library, "absent", lambda: "this processor has no AVX2")
    assert kernels.missing_kernels("float32") == "no compiled kernels: this processor has no AVX2"
