"""NomicBert and gte from their original files, compared with transformers: names, scaling, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.parity.oracles import oracle
from tests.parity.test_backbones import difference, expected_of, ids_of
from tests.tiny import TEXTS, Layout, drop_tensor, edit_json, write_checkpoint

from millpond import Engine
from millpond.errors import ModelLoadError, UnsupportedArchitectureError, WeightMismatchError

pytestmark = pytest.mark.contract  # two engines for each case, one of them a peer's

TOLERANCE = 1e-5
VISIBLE = 1e-3


def states(folder: Path, **options: Any) -> list[np.ndarray]:
    with Engine(folder, **{"dtype": "float32", "device": "cpu", "convert": "embed"} | options) as engine:
        return list(engine.token_embed(TEXTS, normalize=False).embeddings)


def by_description(folder: Path) -> Any:
    return expected_of(folder, TEXTS)


@torch.inference_mode()
def by_transformers(folder: Path, model_class: Any, **config: Any) -> list[np.ndarray]:
    """transformers' class, which reads the original names, with a config from this file."""
    size = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    content = json.loads((folder / "config.json").read_text())
    settings = model_class.config_class(**size, vocab_size=content["vocab_size"], max_position_embeddings=64, **config)
    model = model_class.from_pretrained(folder, config=settings, attn_implementation="eager").eval()
    return [model(input_ids=one[None]).last_hidden_state[0].numpy() for one in ids_of(folder, TEXTS)]


def without(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Simulate an older transformers; patched by path, because its lazy module is replaced at the first import."""
    assert transformers.PreTrainedModel is not None
    monkeypatch.setattr(f"transformers.{name}", None)


def rope(theta: float, **scaling: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **scaling}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    return lambda family, **options: write_checkpoint(tmp_path / "model", family, **options)


# --- NomicBert --------------------------------------------------------------------------------------------------------


def test_nomic_equals_transformers_reading_of_the_same_file(plain):
    expected = by_transformers(plain("nomic"), transformers.NomicBertModel, rope_parameters=rope(1000.0))
    worst = difference(states(plain("nomic")), expected)
    assert worst <= TOLERANCE


@pytest.mark.parametrize(("activation", "formula"), [("geglu", "gelu"), ("glu", "sigmoid")])
def test_nomics_other_gates(activation, formula, write):
    folder = write("nomic", config={"activation_function": activation})
    expected = by_transformers(folder, transformers.NomicBertModel, hidden_act=formula, rope_parameters=rope(1000.0))
    actual = states(folder)
    worst, other = difference(actual, expected), difference(actual, by_description(folder))
    assert worst <= TOLERANCE
    assert other > VISIBLE  # the reference with the usual gate differs


def test_nomic_ends_where_it_was_trained(write):
    """sentence_bert_config.json has 8192, which the original reaches with a scaling that depends on the batch."""
    folder = write(
        "nomic",
        sentence_transformers=Layout(style="old", max_seq_length=8192),
        config={"n_positions": 8192, "max_trained_positions": 2048},
        tokenizer_limit=8192,
    )
    with Engine(folder, dtype="float32", device="cpu") as engine:
        assert engine.spec.max_length == 2048
    edit_json(folder / "config.json", max_trained_positions=None)
    with Engine(folder, dtype="float32", device="cpu") as engine:
        assert engine.spec.max_length == 2048
    with pytest.raises(ModelLoadError, match=r"max_length=4096 is more than .* \(2048\)"):
        Engine(folder, max_length=4096)


@pytest.mark.parametrize(
    "changed",
    [
        {"rotary_emb_base": 10000},
        {"layer_norm_epsilon": 0.1},
        {"n_head": 2},
        {"activation_function": "geglu"},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_notices_that_a_field_of_nomic_is_read_wrongly(changed, plain):
    moved = difference(states(plain("nomic"), hf_overrides=changed), by_description(plain("nomic")))
    assert moved > VISIBLE


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_experts": 8, "moe_every_n_layers": 2}, r"activation_function 'swiglu'.*with experts; it runs gelu"),
        ({"prenorm": True}, "prenorm True"),
        ({"qkv_proj_bias": True}, "qkv_proj_bias True"),
        ({"mlp_fc1_bias": True}, "mlp_fc1_bias True"),
        ({"mlp_fc2_bias": True}, "mlp_fc2_bias True"),
        ({"rotary_emb_fraction": 0.5}, "rotary_emb_fraction 0.5"),
        ({"rotary_emb_fraction": 0}, "rotary_emb_fraction 0"),
        ({"rotary_emb_interleaved": True}, "rotary_emb_interleaved True"),
        ({"rotary_emb_scale_base": 512}, "rotary_emb_scale_base 512"),
        ({"use_rms_norm": True}, "use_rms_norm True"),
        ({"causal": True}, "causal True"),
        ({"scale_attn_weights": False}, "scale_attn_weights False"),
        ({"activation_function": "gelu"}, "activation_function 'gelu'.*swiglu"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_unsupported_nomic_settings_are_refused(changed, message, plain):
    with pytest.raises(UnsupportedArchitectureError, match=message):
        Engine(plain("nomic"), hf_overrides=changed)


# --- gte --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "theta", "scaling", "types"),
    [
        ("gte", 160000.0, {"rope_type": "linear", "factor": 8 ** (2 / 12)}, 1),
        ("gte-en", 1000000.0, {"rope_type": "linear", "factor": 2 ** (2 / 12)}, 0),
        ("gte-snowflake", 160000.0, {}, 1),
    ],
)
@pytest.mark.skipif(not hasattr(transformers, "GteModel"), reason="this transformers has no GteModel")
def test_gte_equals_transformers_reading_of_the_same_file(family, theta, scaling, types, plain):
    expected = by_transformers(
        plain(family), transformers.GteModel, type_vocab_size=types, rope_parameters=rope(theta, **scaling)
    )
    worst = difference(states(plain(family)), expected)
    assert worst <= TOLERANCE


@pytest.mark.parametrize(
    "claimed",
    [
        "NewModel",
        "GteModel",
        "GteNewModel",
        "NewForTokenClassification",
        "NewForSequenceClassification",
        "GteNewForSequenceClassification",
        "GteForSequenceClassification",
    ],
)
@pytest.mark.parametrize("model_type", ["new", "gte"])
def test_gte_under_each_of_its_names(claimed, model_type, write):
    folder = write("gte", config={"architectures": [claimed], "model_type": model_type})
    prefixed = any(name.startswith("new.") for name in load_file(folder / "model.safetensors"))
    assert prefixed != claimed.endswith("Model")
    worst = difference(states(folder), by_description(folder))
    assert worst <= TOLERANCE


def test_a_sparse_head_leaves_gte_a_dense_model(write):
    folder = write("gte", config={"architectures": ["NewForTokenClassification"]})
    with Engine(folder, dtype="float32", device="cpu") as engine:
        assert engine.tasks >= {"embed", "token_embed"}
        assert not engine.spec.labels
        assert engine.embed(TEXTS).embeddings.shape == (len(TEXTS), 48)


@pytest.mark.parametrize("family", ["gte", "gte-en", "gte-snowflake"])
def test_gte_before_transformers_had_its_class(family, plain, monkeypatch):
    folder = plain(family)
    expected = by_description(folder)
    without(monkeypatch, "GteModel")
    worst = difference(states(folder, backend="torch"), expected)
    assert worst <= TOLERANCE


def test_a_class_that_transformers_lacks_is_named(plain, monkeypatch):
    folder = plain("nomic")
    without(monkeypatch, "NomicBertModel")
    with pytest.raises(UnsupportedArchitectureError, match=r"transformers \d.* has no NomicBertModel; install a newer"):
        Engine(folder, backend="torch")


@pytest.mark.parametrize(
    "changed",
    [
        {"rope_theta": 160000},
        {"rope_scaling": {"factor": 4.0}},
        {"rope_scaling": None, "rope_theta": 160000},  # what transformers' own default would be
        {"hidden_act": "silu"},
        {"layer_norm_eps": 0.1},
    ],
    ids=str,
)
def test_notices_that_a_field_of_gte_is_read_wrongly(changed, plain):
    moved = difference(states(plain("gte"), hf_overrides=changed), by_description(plain("gte")))
    assert moved > VISIBLE


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rope_scaling": {"mixed_b": 0.6}}, "mixed_b 0.6"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope scaling 'dynamic'"),
        ({"position_embedding_type": "absolute"}, "position_embedding_type 'absolute'.*only 'rope'"),
        ({"layer_norm_type": "rms_norm"}, "layer_norm_type 'rms_norm'"),
        ({"logn_attention_scale": True}, "logn_attention_scale True"),
        ({"pack_qkv": False}, "pack_qkv False"),
    ],
    ids=str,
)
def test_unsupported_gte_settings_are_refused(changed, message, plain):
    with pytest.raises(UnsupportedArchitectureError, match=message):
        Engine(plain("gte"), hf_overrides=changed)


def test_a_missing_tensor_of_gte_is_named(write):
    folder = write("gte")
    drop_tensor(folder, "encoder.layer.1.mlp.up_gate_proj.weight")
    with pytest.raises(WeightMismatchError, match=r"misses layers\.1\.mlp\.gate_proj\.weight and 1 more"):
        Engine(folder)


def test_gte_classifies_as_transformers_does(write):
    folder = write("gte", config={"architectures": ["NewForSequenceClassification"], "num_labels": 2})
    tensors = load_file(folder / "model.safetensors")
    with torch.inference_mode():
        reference = oracle(folder)
        first = torch.stack([reference(one)[0] for one in ids_of(folder, TEXTS)])
        pooled = (first @ tensors["new.pooler.dense.weight"].T + tensors["new.pooler.dense.bias"]).tanh()
        expected = (pooled @ tensors["classifier.weight"].T + tensors["classifier.bias"]).softmax(-1).numpy()
    with Engine(folder, dtype="float32", device="cpu") as engine:
        actual = engine.classify(TEXTS).probs
    assert np.abs(actual - expected).max() < TOLERANCE
