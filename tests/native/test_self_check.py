"""The native encoder in the self-check: damaged kernels are noticed when a model is loaded, and torch serves."""

import ctypes
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.tiny import SENTENCES, write_checkpoint

from millpond import Engine
from millpond.attention import kernels
from millpond.attention import self_check as notes
from millpond.attention.self_check import check, run
from millpond.models.native import families, self_check, structs
from millpond.models.native.encoder import NativeEncoder
from millpond.models.native.self_check import encoder_rows
from millpond.native import library

pytestmark = pytest.mark.skipif(library.kernel_table() is None, reason="no compiled kernels")
TEXTS = ("a", *SENTENCES[:4])
SIZE = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if encoder_rows(dtype, "none")]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def nothing_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "_disabled", {})
    monkeypatch.setattr(notes, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setenv("MILLPOND_SELF_CHECK", "1")


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@every_dtype
@pytest.mark.parametrize("int8", ["none", "feeds", "all"])
def test_a_right_encoder_agrees(dtype, int8, caplog):
    for row in encoder_rows(dtype, int8):
        found = run(row)
        # Far from the limit, so that no processor's rounding comes near it.
        assert 1 - found.similarity < (1 - row.least) / 5 and not found.wrong, found


class Damage:
    """Kernels whose entries do something wrong; used in place of the right ones, by every plan that is built."""

    def __init__(self, monkeypatch, **entries):
        right = families.kernels_of
        self.calls = 0

        def kernels_of(*args, **options):
            kernels = right(*args, **options)
            if kernels is None:
                return None
            return replace(kernels, **{name: self._wrapped(getattr(kernels, name), entries[name]) for name in entries})

        for module in (families, self_check):  # of models, and of the check
            monkeypatch.setattr(module, "kernels_of", kernels_of)

    def _wrapped(self, entry, mistake):
        def wrapped(address):
            self.calls += 1
            return mistake(entry, address)

        return wrapped


def encode_call(address):
    return structs.EncodeCall.from_address(address)


def with_call(**fields):
    """The entry, called with other fields of the call's struct."""

    def mistake(entry, address):
        call = structs.EncodeCall.from_buffer_copy(encode_call(address))
        for name, value in fields.items():
            setattr(call, name, value)
        return entry(ctypes.addressof(call))

    return mistake


def with_steps(change):
    """The entry, called with the steps that ``change`` makes of a model's."""

    def mistake(entry, address):
        call = structs.EncodeCall.from_buffer_copy(encode_call(address))
        model = structs.Model.from_buffer_copy(call.model.contents)
        copies = (structs.Step * model.count)(*(model.steps[i] for i in range(model.count)))
        kept = change(list(copies))
        steps = (structs.Step * len(kept))(*kept)
        model.steps, model.count = steps, len(kept)
        call.model = ctypes.pointer(model)
        return entry(ctypes.addressof(call))

    return mistake


def without(kind, every=False):
    def change(steps):
        found = [step for step in steps if step.kind == kind]
        dropped = found if every else found[:1]
        return [step for step in steps if not any(step is one for one in dropped)]

    return with_steps(change)


def changed(kind, **fields):
    def change(steps):
        for step in steps:
            for name, value in fields.items() if step.kind == kind else ():
                setattr(step, name, value)
        return steps

    return with_steps(change)


def result_of(address):
    """The numbers that a call writes, ``[rows, hidden]``."""
    call = encode_call(address)
    bounds = np.ctypeslib.as_array(ctypes.cast(call.bounds, ctypes.POINTER(ctypes.c_int32)), (call.texts + 1,))
    rows = int(bounds[-1]) if call.reading == structs.ALL_ROWS else call.texts
    numbers = ctypes.cast(call.out, ctypes.POINTER(ctypes.c_float))
    return np.ctypeslib.as_array(numbers, (rows, call.model.contents.hidden))


def spoiled(spoil):
    def mistake(entry, address):
        entry(address)
        spoil(result_of(address))
        return 0

    return mistake


def zero_last_row(rows):
    rows[-1] = 0


def one_nan(rows):
    rows[0, 1] = np.nan


def exchange_columns(rows):
    rows[:, :32], rows[:, 32:] = rows[:, 32:].copy(), rows[:, :32].copy()


def raising(entry, address):
    raise OSError("exception: illegal instruction")


def mean_is_first(entry, address):
    call = encode_call(address)
    fields = {"reading": structs.FIRST_ROW} if call.reading == structs.MEAN_ROW else {}
    return with_call(**fields)(entry, address)


MISTAKES = {
    "a-step-less": with_steps(lambda steps: steps[:-1]),
    "no-feed": without(structs.FEED, every=True),
    "no-rotation": without(structs.HEADS, every=True),
    "scale": changed(structs.ATTENTION, scale=1.0),
    "window": changed(structs.ATTENTION, before=1 << 40, after=1 << 40),
    "causality": changed(structs.ATTENTION, after=1 << 40),
    "softcap": changed(structs.ATTENTION, softcap=0.0),
    "distances": changed(structs.ATTENTION, distances=None),
    "activation": changed(structs.FEED, activation=structs.ACTIVATIONS["relu"]),
    "keys": with_call(keys=None),
    "types": with_call(types=None),
    "offset": with_call(offset=0),
    "adapters": with_call(adapters=None),
    "mean": mean_is_first,
    "unwritten": spoiled(zero_last_row),
    "nan": spoiled(one_nan),
    "columns": spoiled(exchange_columns),
    "raises": raising,
}


@every_dtype
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_encoder_is_noticed(mistake, dtype, monkeypatch):
    damage = Damage(monkeypatch, encode=MISTAKES[mistake])
    (row,) = encoder_rows(dtype, "none")
    assert run(row).wrong and damage.calls


@pytest.mark.parametrize("int8", ["feeds", "all"])
def test_wrong_products_in_eight_bits_are_noticed(int8, monkeypatch):
    def dropped(entry, address):
        """A third of each weight's columns."""
        pack = structs.PackCall.from_address(address)
        weight = np.ctypeslib.as_array(ctypes.cast(pack.weight, ctypes.POINTER(ctypes.c_int8)), (pack.out, pack.in_))
        weight[:, : pack.in_ // 3] = 0
        return entry(address)

    damage = Damage(monkeypatch, pack_int8=dropped)
    for row in encoder_rows(torch.float32, int8):
        assert run(row).wrong and damage.calls


def embedded(folder, **options):
    with Engine(folder, device="cpu", dtype="float32", **options) as engine:
        return isinstance(engine._replicas.runner.backbone, NativeEncoder), engine.embed(TEXTS).embeddings


def test_a_wrong_encoder_serves_no_model_of_the_process(monkeypatch, tmp_path, caplog):
    folder = write_checkpoint(tmp_path / "model", config=SIZE)
    native, right = embedded(folder)
    assert native
    Damage(monkeypatch, encode=MISTAKES["scale"])
    assert embedded(folder)[0]  # what was right before is not compared again
    monkeypatch.setattr(notes, "cache_folder", lambda: tmp_path / "another")
    for _ in range(2):
        native, rows = embedded(folder)
        assert not native
        np.testing.assert_allclose(rows, right, atol=1e-6)
    (message,) = warnings(caplog)
    for part in (f"encoder {library.isa()}", torch.__version__, "float32", "torch's operators", "env --check"):
        assert part in message


def test_without_the_check_a_wrong_encoder_serves(monkeypatch, tmp_path, caplog):
    folder = write_checkpoint(tmp_path / "model", config=SIZE)
    _, right = embedded(folder)
    monkeypatch.setattr(notes, "cache_folder", lambda: tmp_path / "another")
    Damage(monkeypatch, encode=MISTAKES["scale"])
    monkeypatch.setenv("MILLPOND_SELF_CHECK", "0")
    native, rows = embedded(folder)
    assert native and np.abs(rows - right).max() > 1e-3 and not warnings(caplog)


def test_a_disabled_precision_leaves_the_others(monkeypatch):
    Damage(monkeypatch, encode=MISTAKES["nan"])
    (wrong,) = check(encoder_rows(torch.float32, "none"))
    assert wrong.wrong and kernels.disabled("encoder in float32")
    assert kernels.disabled("encoder in bfloat16") is None
    assert check(encoder_rows(torch.float32, "none")) == []
