"""A native forward beside torch's operators: damaged kernels are noticed when a model is loaded, and replaced."""

import ctypes
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny import SENTENCES, write_checkpoint

from millpond import Engine
from millpond.attention import self_check as table_check
from millpond.checkpoints.architectures import find
from millpond.checkpoints.checkpoint import read_checkpoint
from millpond.config import EngineConfig
from millpond.engine.loading import load
from millpond.models import load as loads
from millpond.models.native import families, structs
from millpond.models.native.encoder import NativeEncoder
from millpond.models.native.self_check import check, expected_of
from millpond.native import library

pytestmark = pytest.mark.skipif(library.kernel_table() is None, reason="no compiled kernels")
TEXTS = ("a", *SENTENCES[:4])
# Sizes that the native encoder has kernels for.
SIZE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "pooler_hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
FAMILIES = (
    "bert",
    "roberta",
    "mpnet",
    "distilbert",
    "electra",
    "modernbert",
    "nomic",
    "gte",
    "jina",
    "qwen3",
    "gemma2",
    "gemma3",
)
DTYPES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            library.kernel_table() is None or not getattr(library.kernel_table(), f"encode_{name}"),
            reason=f"no kernels of {name}",
        ),
    )
    for name in ("float32", "bfloat16")
]
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
needs_int8 = pytest.mark.skipif(
    library.kernel_table() is None or not library.kernel_table().pack_weight_int8, reason="no kernels of eight bits"
)


@pytest.fixture(autouse=True)
def nobody_warned(monkeypatch):
    monkeypatch.setattr(table_check, "_told", set())
    monkeypatch.setenv("MILLPOND_SELF_CHECK", "1")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root, folders = tmp_path_factory.mktemp("native"), {}

    def written(family):
        if family not in folders:
            more = {"embedding_size": 32} if family == "electra" else {}
            folders[family] = write_checkpoint(root / family, family, config={**SIZE, **more})
        return folders[family]

    return written


def config(folder, dtype="float32", **options):
    return EngineConfig(model=str(folder), device="cpu", dtype=dtype, **options)


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@every_dtype
@pytest.mark.parametrize("quantization", [None, "int8", "int8-all"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_right_encoder_agrees(family, dtype, quantization, written, caplog):
    loaded = load(config(written(family), dtype, quantization=quantization))
    native = isinstance(loaded.runner.backbone, NativeEncoder)
    assert native or quantization is not None  # eight bits are not for every family and processor
    if native:
        (compared,) = loaded.checks
        assert not compared.wrong and compared.kernel == f"encoder {library.isa()}", compared
        assert compared.similarity > (0.999 if quantization is None else 0.99)
        assert dtype in compared.call and (quantization or "") in compared.call
        assert not warnings(caplog)


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

        monkeypatch.setattr(families, "kernels_of", kernels_of)

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
    "a-step-less": ("bert", with_steps(lambda steps: steps[:-1])),
    "no-feed": ("bert", without(structs.FEED, every=True)),
    "no-rotation": ("qwen3", without(structs.HEADS, every=True)),
    "scale": ("bert", changed(structs.ATTENTION, scale=1.0)),
    "window": ("modernbert", changed(structs.ATTENTION, before=1 << 40, after=1 << 40)),
    "causality": ("qwen3", changed(structs.ATTENTION, after=1 << 40)),
    "softcap": ("gemma2", changed(structs.ATTENTION, softcap=0.0)),
    "distances": ("mpnet", changed(structs.ATTENTION, distances=None)),
    "activation": ("bert", changed(structs.FEED, activation=structs.ACTIVATIONS["relu"])),
    "keys": ("bert", with_call(keys=None)),
    "types": ("bert", with_call(types=None)),
    "offset": ("roberta", with_call(offset=0)),
    "adapters": ("jina", with_call(adapters=None)),
    "mean": ("bert", mean_is_first),
    "unwritten": ("bert", spoiled(zero_last_row)),
    "nan": ("gemma3", spoiled(one_nan)),
    "columns": ("bert", spoiled(exchange_columns)),
    "raises": ("bert", raising),
}


def embedded(folder, dtype, **options):
    with Engine(folder, device="cpu", dtype=dtype, **options) as engine:
        return engine, engine.embed(TEXTS).embeddings


@pytest.fixture
def in_torch(monkeypatch):
    """What an engine without native forwards gives."""

    def in_torch(folder, dtype, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loads, "native_forward", lambda *_: None)
            engine, rows = embedded(folder, dtype, **options)
            assert not isinstance(engine._replicas.runner.backbone, NativeEncoder)
            return rows

    return in_torch


@every_dtype
@pytest.mark.parametrize(("family", "mistake"), MISTAKES.values(), ids=MISTAKES)
def test_a_wrong_encoder_is_replaced_with_one_warning(family, mistake, dtype, written, in_torch, monkeypatch, caplog):
    expected = in_torch(written(family), dtype)
    caplog.clear()
    Damage(monkeypatch, encode=mistake)
    for _ in range(2):
        engine, rows = embedded(written(family), dtype)
        assert not isinstance(engine._replicas.runner.backbone, NativeEncoder)
        assert engine._replicas.checks[0].wrong
        np.testing.assert_allclose(rows, expected, atol=1e-6 if dtype == "float32" else 2e-2)
    (message,) = warnings(caplog)
    for part in (f"encoder {library.isa()}", torch.__version__, dtype, "layers", "torch's operators", "env --check"):
        assert part in message
    assert ("illegal instruction" in message) == (mistake is raising)


@needs_int8
@every_dtype
@pytest.mark.parametrize("quantization", ["int8", "int8-all"])
def test_wrong_products_in_eight_bits_are_replaced(quantization, dtype, written, in_torch, monkeypatch, caplog):
    expected = in_torch(written("bert"), dtype, quantization=quantization)
    caplog.clear()

    def dropped(entry, address):
        """A third of each weight's columns."""
        pack = structs.PackCall.from_address(address)
        weight = np.ctypeslib.as_array(ctypes.cast(pack.weight, ctypes.POINTER(ctypes.c_int8)), (pack.out, pack.in_))
        weight[:, : pack.in_ // 3] = 0
        return entry(address)

    damage = Damage(monkeypatch, pack_int8=dropped)
    engine, rows = embedded(written("bert"), dtype, quantization=quantization)
    assert damage.calls and not isinstance(engine._replicas.runner.backbone, NativeEncoder)
    np.testing.assert_allclose(rows, expected, atol=1e-6 if dtype == "float32" else 2e-2)
    (message,) = warnings(caplog)
    assert quantization in message


def test_without_the_check_a_wrong_encoder_serves(written, in_torch, monkeypatch, caplog):
    Damage(monkeypatch, encode=MISTAKES["scale"][1])
    monkeypatch.setenv("MILLPOND_SELF_CHECK", "0")
    engine, rows = embedded(written("bert"), "float32")
    assert isinstance(engine._replicas.runner.backbone, NativeEncoder) and not engine._replicas.checks
    assert np.abs(rows - in_torch(written("bert"), "float32")).max() > 1e-3
    assert not warnings(caplog)
    assert load(config(written("bert")), check=True).checks[0].wrong  # asked for, as by millpond env --check


def test_a_model_without_the_mistake_keeps_its_encoder(written, monkeypatch, caplog):
    """A mistake that only adapters show is none of BERT's."""
    Damage(monkeypatch, encode=MISTAKES["adapters"][1])
    for family, native in (("bert", True), ("jina", False), ("bert", True)):
        loaded = load(config(written(family)))
        assert isinstance(loaded.runner.backbone, NativeEncoder) == native
    assert len(warnings(caplog)) == 1


@every_dtype
def test_several_replicas_are_compared_and_one_warning_is_logged(dtype, written, monkeypatch, caplog):
    Damage(monkeypatch, encode=MISTAKES["nan"][1])
    loaded = load(replace(config(written("bert"), dtype), device=["cpu", "cpu"]))
    assert len(loaded.runners) == 2
    assert not any(isinstance(runner.backbone, NativeEncoder) for runner in loaded.runners)
    assert len(warnings(caplog)) == 1


def test_a_check_that_cannot_run_leaves_the_encoder(written, monkeypatch, caplog):
    monkeypatch.setattr("millpond.models.native.self_check._view_of", lambda *_: 1 / 0)
    loaded = load(config(written("bert")))
    assert isinstance(loaded.runner.backbone, NativeEncoder) and not loaded.checks
    assert not warnings(caplog)


def test_texts_are_no_longer_than_the_model_reads(tmp_path):
    folder = write_checkpoint(
        tmp_path / "model", "bert", config={**SIZE, "max_position_embeddings": 16}, tokenizer_limit=16
    )
    loaded = load(config(folder))
    assert not loaded.checks[0].wrong and loaded.checks[0].similarity > 0.999


def packed(folder, dtype=torch.float32):
    checkpoint = read_checkpoint(folder)
    row = find(checkpoint.config, str(folder))
    with loads.plain_linears():
        backbone = loads.load_backbone(checkpoint, row, device=torch.device("cpu"), dtype=dtype)
    return backbone, row, checkpoint.config


@every_dtype
@pytest.mark.parametrize("family", FAMILIES)
def test_the_backbone_is_not_changed(family, dtype, written, monkeypatch):
    seen = []

    def watched(backbone, *rest):
        before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in backbone.state_dict().items()}
        layers = list(backbone.layers)
        expected = expected_of(backbone, *rest)
        after = backbone.state_dict()
        assert list(backbone.layers) == layers and after.keys() == before.keys()
        assert all(tensor.data_ptr() == before[name][0] for name, tensor in after.items())
        assert all(torch.equal(tensor, before[name][1]) for name, tensor in after.items())
        seen.append(expected)
        return expected

    monkeypatch.setattr(loads, "expected_of", watched)
    load(config(written(family), dtype))
    (expected,) = seen
    assert expected.states.dtype is torch.float32 and len(expected.states) == sum(expected.lengths)


def test_an_encoder_is_compared_with_what_it_must_give(written):
    backbone, row, fields = packed(written("bert"))
    expected, encoder = expected_of(backbone, row, fields), families.native_forward(backbone)
    assert not check(encoder, expected).wrong
    assert check(encoder, replace(expected, states=expected.states.roll(1, 1))).wrong


def test_a_plan_that_does_not_name_its_layers_is_not_compared(written):
    backbone, row, fields = packed(written("bert"))
    expected, encoder = expected_of(backbone, row, fields), families.native_forward(backbone)
    encoder.plan = replace(encoder.plan, layers=())
    found = check(encoder, expected)
    assert found.similarity is None and not found.wrong and "layers" in found.finding


def test_a_layer_of_each_kind_is_compared(tmp_path):
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    folder = write_checkpoint(
        tmp_path / "model", "gemma3", config={**SIZE, "num_hidden_layers": 6, "layer_types": kinds}
    )
    assert expected_of(*packed(folder)).layers == (0, 5)
    assert expected_of(
        *packed(write_checkpoint(tmp_path / "bert", config={**SIZE, "num_hidden_layers": 5}))
    ).layers == (0, 1)
    assert expected_of(*packed(write_checkpoint(tmp_path / "one", config={**SIZE, "num_hidden_layers": 1}))).layers == (
        0,
    )


@every_dtype
@pytest.mark.parametrize("family", ["bert", "qwen3", "modernbert"])
def test_a_large_layer_runs_in_its_own_precision(family, dtype, written, monkeypatch, caplog):
    monkeypatch.setattr("millpond.models.native.self_check._COPIED_WEIGHTS", 1)
    monkeypatch.setattr("millpond.models.native.self_check._copied", lambda part: 1 / 0)
    (compared,) = load(config(written(family), dtype)).checks
    assert not compared.wrong and compared.similarity > 0.998
    Damage(monkeypatch, encode=MISTAKES["no-feed"][1])
    assert load(config(written(family), dtype)).checks[0].wrong


def test_large_layers_are_fewer(written, monkeypatch):
    monkeypatch.setattr("millpond.models.native.self_check._MOST_WEIGHTS", 1)
    assert expected_of(*packed(written("modernbert"))).layers == (0,)


@pytest.mark.parametrize("family", ["deberta-v2", "jamba", "gpt2", "albert"])
def test_families_without_a_plan_are_not_compared(family, tmp_path):
    loaded = load(config(write_checkpoint(tmp_path / "model", family)))
    assert not isinstance(loaded.runner.backbone, NativeEncoder)
    assert not any(compared.kernel.startswith("encoder") for compared in loaded.checks)


def test_a_plan_of_some_layers_shares_the_weights(written):
    loaded = load(config(written("modernbert")))
    plan = loaded.runner.backbone.plan
    layers = len(plan.layers) - 1
    assert layers == 4
    whole, some = plan.of_layers(range(layers)), plan.of_layers([0, 2])
    assert whole.model.count == plan.model.count > some.model.count
    units = {plan.model.steps[i].weight.units for i in range(plan.model.count)}
    assert {some.model.steps[i].weight.units for i in range(some.model.count)} <= units
    steps = [some.model.steps[i] for i in range(some.model.count)]
    assert [step.last for step in steps if step.kind == structs.ATTENTION] == [0, 1]
    ids, bounds = np.arange(9, dtype=np.int32), np.array([0, 4, 9], dtype=np.int32)
    assert torch.equal(NativeEncoder(whole).encode(ids, bounds), loaded.runner.backbone.encode(ids, bounds))
    assert not torch.equal(NativeEncoder(some).encode(ids, bounds), loaded.runner.backbone.encode(ids, bounds))


@every_dtype
@needs_int8
@pytest.mark.parametrize("quantization", [None, "int8", "int8-all"])
@pytest.mark.parametrize("factor", [3, 10])
@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3", "gemma2"])
def test_weights_that_magnify_rounding_prove_nothing(family, factor, quantization, dtype, tmp_path, caplog):
    folder = write_checkpoint(tmp_path / family, family, config=SIZE)
    (file,) = folder.glob("*.safetensors")
    tensors = {name: tensor * factor if tensor.dim() == 2 else tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    loaded = load(config(folder, dtype, quantization=quantization))
    assert isinstance(loaded.runner.backbone, NativeEncoder)
    assert not any(found.wrong for found in loaded.checks)
    assert not warnings(caplog)


@every_dtype
def test_a_mistake_is_found_among_large_weights(dtype, written, monkeypatch, tmp_path, caplog):
    folder = write_checkpoint(tmp_path / "qwen3", "qwen3", config=SIZE)
    (file,) = folder.glob("*.safetensors")
    tensors = {name: tensor * 2 if tensor.dim() == 2 else tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    Damage(monkeypatch, encode=MISTAKES["no-rotation"][1])
    assert load(config(folder, dtype)).checks[0].wrong
    assert len(warnings(caplog)) == 1
