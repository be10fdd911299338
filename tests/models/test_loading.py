"""How a checkpoint becomes a backbone: the table's row, its tensors read directly, its device, its compiled parts."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.pairwise import pairwise
from tests.tiny import TEXTS, write_checkpoint
from tests.tiny.heads import write_splade

from millpond import Engine
from millpond.backends.native.kernels import kernels_of
from millpond.backends.torch import environment
from millpond.backends.torch.attention.segments import Segments
from millpond.backends.torch.forwards.encoder import PackedEncoder
from millpond.backends.torch.forwards.encoder_file import read_encoder
from millpond.backends.torch.loading import load, placement
from millpond.backends.torch.loading.placement import resolve_device, unusable_gpu
from millpond.checkpoints import architectures
from millpond.checkpoints.architecture import Architecture, EncoderFields, EncoderNames, MaskedHeadNames
from millpond.checkpoints.architectures import find
from millpond.checkpoints.checkpoint import read_checkpoint
from millpond.checkpoints.classifier_steps import FamilyHead, Linear
from millpond.checkpoints.head_tensors import is_head_tensor
from millpond.checkpoints.tokenizers.read import read_tokenizer
from millpond.errors import UnsupportedArchitectureError, WeightMismatchError

# --- A new BERT-like family is one row of the table ------------------------------------------------------------------


# Everything that is written to add the family.
FOOBERT = Architecture(
    prefix="FooBert",
    model_type="foobert",
    native="BertModel",
    pooling="cls",
    positions="absolute",
    token_types=True,
    forward="millpond.backends.torch.forwards.encoder:PackedEncoder",
    encoder=EncoderNames(
        prefix="foo",
        layers="blocks",
        query="mix.q",
        key="mix.k",
        value="mix.v",
        attention_out="mix.out",
        attention_norm="mix.norm",
        up="feed.up",
        down="feed.down",
        norm="feed.norm",
        fields=EncoderFields(layers="depth", heads="branches", inner="feed_size", activation="feed_act"),
    ),
    head=FamilyHead(
        sequence=(Linear(name="summary"), "tanh", Linear(name="verdict")), tokens=(Linear(name="verdict"),)
    ),
    mlm=MaskedHeadNames(
        backbone="foo",
        dense="words.dense",
        norm="words.norm",
        decoder="words.out.weight",
        biases=("words.out.bias",),
        activation="feed_act",
    ),
    example="nobody/foobert",
)

TENSORS = {
    "bert.": "foo.",
    "encoder.layer.": "blocks.",
    "attention.self.query": "mix.q",
    "attention.self.key": "mix.k",
    "attention.self.value": "mix.v",
    "attention.output.dense": "mix.out",
    "attention.output.LayerNorm": "mix.norm",
    "intermediate.dense": "feed.up",
    "output.dense": "feed.down",
    "output.LayerNorm": "feed.norm",
    "pooler.dense": "summary",
    "classifier.": "verdict.",
    "cls.predictions.transform.dense": "words.dense",
    "cls.predictions.transform.LayerNorm": "words.norm",
    "cls.predictions.bias": "words.out.bias",
}
FIELDS = {
    "num_hidden_layers": "depth",
    "num_attention_heads": "branches",
    "intermediate_size": "feed_size",
    "hidden_act": "feed_act",
}


def renamed(folder: Path) -> Path:
    """The BERT in ``folder`` made a FooBert."""
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for old, new in TENSORS.items():
            name = name.replace(old, new)
        tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = {FIELDS.get(name, name): value for name, value in config.items()}
    config |= {"model_type": "foobert", "architectures": [f"Foo{config['architectures'][0]}"]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def use_row(monkeypatch: pytest.MonkeyPatch, row: Architecture = FOOBERT) -> None:
    """The table with one more row."""
    monkeypatch.setattr(architectures, "ARCHITECTURES", (*architectures.ARCHITECTURES, row))


def vectors(engine: Engine) -> Any:
    return engine.embed(TEXTS).embeddings


def sparse_weights(engine: Engine) -> Any:
    output = engine.encode(TEXTS, task="sparse_embed")
    return np.concatenate([[*row.keys(), *row.values()] for row in output.embeddings])


KINDS: dict[str, tuple[Callable[..., Path], dict[str, Any], Callable[[Engine], Any]]] = {
    "embeds": (write_checkpoint, {}, vectors),
    "classifies": (write_checkpoint, {"head": "SequenceClassification"}, lambda engine: engine.classify(TEXTS).probs),
    "classifies tokens": (
        write_checkpoint,
        {"head": "TokenClassification"},
        lambda engine: engine.token_classify(TEXTS).probs.flat,
    ),
    "embeds sparsely": (write_splade, {}, sparse_weights),
}


def result(folder: Path, read: Callable[[Engine], Any], dtype: str = "float32", backend: str = "torch") -> Any:
    with Engine(folder, device="cpu", dtype=dtype, backend=backend) as engine:
        if backend == "torch":
            assert isinstance(engine._replicas.runners[0].model.backbone, PackedEncoder)
        return read(engine)


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_row_is_all_that_a_new_family_needs(kind, dtype, backend, tmp_path, monkeypatch):
    if backend == "native" and kernels_of(dtype) is None:
        pytest.skip(f"no kernels for {dtype}")
    write, options, read = KINDS[kind]
    expected = result(write(tmp_path / "bert", **options), read, dtype, backend)
    folder = renamed(write(tmp_path / "foo", **options))
    with pytest.raises(UnsupportedArchitectureError, match="foobert"):
        Engine(folder, device="cpu")
    use_row(monkeypatch)
    np.testing.assert_array_equal(result(folder, read, dtype, backend), expected)


def test_the_tokenizer_is_read_without_transformers(tmp_path):
    folder = write_checkpoint(tmp_path / "foo")
    expected = read_tokenizer(folder).backend.to_str()
    assert read_tokenizer(renamed(folder)).backend.to_str() == expected


def test_a_family_without_a_packed_forward_runs_in_transformers_class(tmp_path, monkeypatch):
    """Under BERT's own names, since the row has no module that would rename the tensors."""
    folder = write_checkpoint(tmp_path / "foo")
    expected = result(folder, vectors)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "foobert", "architectures": ["FooBertModel"]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    use_row(monkeypatch, replace(FOOBERT, forward=None, encoder=None, pooler=True))
    with Engine(folder, device="cpu", dtype="float32", backend="torch") as engine:
        assert type(engine._replicas.runners[0].model.backbone).__name__ == "BertModel"
        np.testing.assert_allclose(vectors(engine), expected, atol=1e-5)


def test_every_row_names_code_that_is_there():
    for row in architectures.ARCHITECTURES:
        assert isinstance(row.forward_class(), type) == (row.forward is not None)
        hooks = row.hooks()
        assert (hooks is None) == (row.module is None)
        if hooks is not None:
            assert {"translate", "tensors", "backbone_class", "finish"} & vars(hooks).keys()
        assert architectures.row_of(row.model_type) is row
        # The data that a forward reads is in the row if the row names that forward, or a plan's, which may read both.
        named = str(row.forward).rpartition(":")[2]
        assert (row.encoder is not None) == (named == "PackedEncoder") or named == "PackedPlan"
        # A native plan reads traits, too, where transformers' class runs in torch.
        assert (row.traits is not None) == (named == "PackedDecoder") or named in ("PackedPlan", "None")


# --- Tensors read directly --------------------------------------------------------------------------------------------


DIRECT = ("bert", "distilbert", "electra", "mpnet", "roberta", "xlm-roberta")
LENGTHS = (1, 7, 7, 30)


def states_of(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Hidden states_of ``[tokens, hidden]`` of some token ids in the packed forward."""
    checkpoint = read_checkpoint(str(folder))
    architecture = find(checkpoint.config, str(folder))
    backbone = load.load_backbone(checkpoint, architecture, device=torch.device("cpu"), dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, 100, (1, sum(LENGTHS)), generator=generator)
    offset = architecture.position_offset(checkpoint.config)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None] + offset
    options: dict[str, Any] = {"token_type_ids": ids % 2} if architecture.token_types else {}
    with torch.inference_mode():
        out = backbone(input_ids=ids, position_ids=positions, segments=Segments.of(LENGTHS), **options)
    result: torch.Tensor = out.last_hidden_state[0]
    return result


def is_direct(folder: Path) -> bool:
    checkpoint = read_checkpoint(str(folder))
    row = find(checkpoint.config, str(folder))
    if row.encoder is None:
        return False
    backbone = read_encoder(
        checkpoint.layout.transformer,
        checkpoint.config,
        row.encoder,
        dtype=torch.float32,
        is_head_tensor=partial(is_head_tensor, architecture=row),
    )
    return backbone is not None


@pairwise(family=DIRECT, wrapped=[False, True], dtype=[torch.float32, torch.bfloat16])
def test_direct_reading_equals_transformers_to_the_last_bit(family, wrapped, dtype, tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "model", family, wrapped=wrapped)
    assert is_direct(folder)
    direct = states_of(folder, dtype)
    monkeypatch.setattr(load, "read_encoder", lambda *_, **__: None)
    assert torch.equal(direct, states_of(folder, dtype))


@pytest.mark.parametrize("shape", [{"embedding_size": 16}, {"num_attention_heads": 2}])
def test_electra_with_other_sizes(shape, tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "model", "electra", config=shape)
    direct = states_of(folder)
    monkeypatch.setattr(load, "read_encoder", lambda *_, **__: None)
    assert torch.equal(direct, states_of(folder))


@pytest.mark.parametrize(
    "field",
    [
        {"is_decoder": True},
        {"position_embedding_type": "relative_key"},
        {"pruned_heads": {"0": [1]}},
        {"hidden_size": "64"},
        {"layer_norm_eps": None},
        {"num_attention_heads": 5},
        {"num_hidden_layers": 3},
        {"vocab_size": 7},
    ],
)
def test_an_unusual_config_is_left_to_transformers(field, tmp_path):
    folder = write_checkpoint(tmp_path / "model", "bert")
    assert is_direct(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | field), encoding="utf-8")
    assert not is_direct(folder)


@pytest.mark.parametrize("change", ["missing", "extra", "old name", "shape", "head"])
def test_other_tensors_than_the_config_says(change, tmp_path):
    folder = write_checkpoint(tmp_path / "model", "bert")
    tensors = load_file(folder / "model.safetensors")
    name = "encoder.layer.1.output.LayerNorm.weight"
    if change == "missing":
        del tensors[name]
    elif change == "extra":
        tensors["encoder.layer.1.output.LayerNorm.scale"] = tensors[name].clone()
    elif change == "old name":
        tensors[name.replace("weight", "gamma")] = tensors.pop(name)
    elif change == "shape":
        tensors[name] = tensors[name][:-1].clone()
    else:
        tensors["cls.predictions.bias"] = tensors[name].clone()
    save_file(tensors, folder / "model.safetensors")
    assert is_direct(folder) == (change == "head")
    if change in ("head", "old name"):
        states_of(folder)
    else:
        with pytest.raises(WeightMismatchError):
            states_of(folder)


_START = """
import sys
from millpond import Engine
for folder in sys.argv[1:]:
    with Engine(folder, device="cpu") as engine:
        assert engine.embed(["a"]).embeddings.shape == (1, engine.spec.dimensions)
    print(*sorted({"transformers", "torch._dynamo", "sympy", "scipy", "huggingface_hub"} & set(sys.modules)))
"""


def test_a_bert_starts_without_transformers(tmp_path):
    """Its import takes longer than all other steps together. A family that needs it is the negative control."""
    folders = [write_checkpoint(tmp_path / family, family) for family in ("bert", "gpt2")]
    command = [sys.executable, "-c", _START, *map(str, folders)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    after_bert, after_gpt2 = run.stdout.splitlines()
    assert after_bert == ""
    assert "transformers" in after_gpt2.split()


# --- A GPU that this torch cannot use ---------------------------------------------------------------------------------


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
    assert environment.facts("cpu")["accelerator"] == f"none that can be used: {OLD.rstrip('.')}"


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
    assert environment.facts("cpu")["accelerator"] == "none"


def test_who_asks_for_the_cpu_is_not_warned(machine, caplog):
    machine(error=RuntimeError(OLD))
    assert resolve_device("cpu") == CPU
    assert not warnings(caplog)


@pytest.mark.parametrize(
    ("kernels", "torchs", "expected"),
    [
        pytest.param(True, False, torch.bfloat16, id="kernels-faster-in-it"),
        pytest.param(False, True, torch.float32, id="kernels-slower-in-it"),
        pytest.param(None, True, torch.bfloat16, id="no-kernels-but-products"),
        pytest.param(None, False, torch.float32, id="neither"),
    ],
)
def test_the_precision_of_a_cpu_is_that_which_is_faster(kernels, torchs, expected, monkeypatch):
    monkeypatch.setattr(placement, "bfloat16_is_fast", lambda: kernels)
    monkeypatch.setattr(placement, "has_native_bfloat16", lambda: torchs)
    assert placement.resolve_dtype("auto", CPU, Architecture, None) is expected
    assert placement.resolve_dtype("bfloat16", CPU, Architecture, None) is torch.bfloat16
