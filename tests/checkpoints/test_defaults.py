"""What a config.json leaves out is what transformers' own config classes fill in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.tiny import FAMILIES, write_checkpoint

from millpond.checkpoints.architectures import ARCHITECTURES, find
from millpond.checkpoints.defaults import _DEFAULTS, complete
from millpond.checkpoints.families.native import translate
from millpond.errors import ModelLoadError

# Families whose fields no class of transformers has, and the one whose parts have them.
OWN = ("nomic_bert_moe", "t5gemma2")
ROWS = {row.model_type: row for row in ARCHITECTURES if row.model_type in _DEFAULTS and row.model_type not in OWN}
# Families that transformers has no class of, and the one whose fields theirs are.
LIKE = {
    "llama_bidirec": "llama",
    "internlm2": "llama",
    "jina_bert": "bert",
    "embedding_gemma2": "embedding_gemma2_text",
}
# Fields in which checkpoints of a family differ, as their config.json spells them.
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS: dict[str, list[dict[str, Any]]] = {
    "bert": [{"layer_norm_eps": 1e-7, "hidden_act": "relu"}],
    "distilbert": [{"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3}, {"dim": 32}],
    "deberta-v2": [{"pos_att_type": "P2C|c2p", "position_buckets": 256}, {"pos_att_type": ["c2p"]}],
    "modernbert": [
        {"global_rope_theta": 1e6, "local_rope_theta": 5e3, "local_attention": 64, "global_attn_every_n_layers": 2},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 7.0}}},
        {"num_hidden_layers": 2, "layer_types": ["attention", "sliding_attention"]},
    ],
    "nomic_bert": [{"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, {"head_dim": 32}],
    "gte": [{"rope_parameters": {"rope_type": "linear", "rope_theta": 4e4, "factor": 1.1}}],
    "jina_embeddings_v3": [{"rope_theta": 3e4}],
    "eurobert": [{"rope_theta": 250000.0, "num_attention_heads": 6}, {"num_key_value_heads": 4, "head_dim": 16}],
    "llama": [
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192}},
        {"rope_scaling": LLAMA3, "max_position_embeddings": 4096},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "num_key_value_heads": 8, "attention_bias": True},
        {"rope_parameters": {"rope_theta": 9.0, "rope_type": "default"}, "rope_scaling": None, "rope_theta": 4.0},
        {"partial_rotary_factor": 0.5, "num_key_value_heads": None},
    ],
    "mistral": [{"sliding_window": None}, {"head_dim": 64, "rope_theta": 1e6}, {"sliding_window": 8}],
    "qwen2": [
        {"use_sliding_window": True, "sliding_window": 16, "num_hidden_layers": 4, "max_window_layers": 2},
        {"sliding_window": 16, "num_key_value_heads": None},
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": False, "sliding_window": 0},
    ],
    "qwen3": [{"head_dim": 64, "num_key_value_heads": 8}, {"use_sliding_window": True, "max_window_layers": 1}],
    "gemma": [{"hidden_act": "gelu"}, {"hidden_act": "silu", "use_bidirectional_attention": True}],
    "gemma2": [
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "num_hidden_layers": 3},
        {"sliding_window": None, "rope_theta": 5e4},
    ],
    "gemma3_text": [
        {"use_bidirectional_attention": True, "sliding_window": 512},
        {"sliding_window_pattern": 3, "rope_theta": 2e6, "rope_local_base_freq": 2e4},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 3.0}, "sliding_attention": None}},
    ],
}


def check(config: dict[str, Any], completed: dict[str, Any], model_type: str) -> None:
    from transformers import CONFIG_MAPPING

    expected = CONFIG_MAPPING[model_type].from_dict(json.loads(json.dumps(config)))
    compared = 0
    # A family's translation computes these, or its plan: a list of windows of a number, a width that LFM2's factor
    # gives, EmbeddingGemma 2's width of the states, and what differs from layer to layer.
    of_families = {
        "lfm2": {"intermediate_size"},
        "embedding_gemma2_text": {"hidden_size", "head_dim"},
        "neomme": {"sliding_window"},
    }
    translated = {"attention_window"} | of_families.get(model_type, set())
    own = next((family for family, like in LIKE.items() if like == model_type and family in _DEFAULTS), model_type)
    known = _DEFAULTS.get(own, _DEFAULTS["gemma3_text"])
    for name in {*known, "rope_parameters", "sliding_window", "head_dim"} - translated:
        if hasattr(expected, name) and name in completed:
            assert completed[name] == getattr(expected, name), name
            compared += 1
    assert compared >= 8


@pytest.mark.torch
@pytest.mark.parametrize("family", sorted(ROWS))
def test_the_defaults_are_those_of_transformers_class(family):
    model_type = LIKE.get(family, family)
    for config in ({}, *CONFIGS.get(family, ())):
        given = json.dumps(config)
        completed = complete(config, ROWS[family])
        assert json.dumps(config) == given
        check(config, completed, model_type)


@pytest.mark.torch
@pytest.mark.parametrize("part", ["t5gemma2_text", "t5gemma2_decoder"])
def test_the_parts_of_t5gemma2_have_gemma_3_s_defaults(part):
    for config in ({}, *CONFIGS["gemma3_text"][1:]):
        check(config, complete(config, ROWS["gemma3_text"]), part)


@pytest.mark.torch
@pytest.mark.contract
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_checkpoint_s_config_is_read_as_transformers_reads_it(family, tmp_path):
    folder = write_checkpoint(tmp_path / "model", family)
    config = json.loads((folder / "config.json").read_text())
    row = find(config, family)
    if row.model_type not in ROWS:
        pytest.skip("no plan, or no class")
    native = translate(row, config, family)
    check(native, complete(native, row), LIKE.get(row.model_type, row.model_type))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "768"),
        ("hidden_size", True),
        ("hidden_act", 3),
        ("layer_norm_eps", "1e-5"),
        ("hidden_size", 1.5),
    ],
)
def test_a_field_of_another_type(field, value):
    with pytest.raises(ModelLoadError, match=f"{field} is .* in config.json; it must be of type"):
        complete({field: value}, ROWS["bert"])


@pytest.mark.parametrize(
    ("field", "value"), [("num_attention_heads", 0), ("hidden_size", -3), ("num_hidden_layers", 0)]
)
def test_a_size_of_nothing(field, value):
    with pytest.raises(ModelLoadError, match=f"{field} is .* in config.json; it must be at least 1"):
        complete({field: value}, ROWS["bert"])


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("qwen3", {"head_dim": 0}),
        ("qwen3", {"num_key_value_heads": 0}),
        ("bert", {"num_attention_heads": -12}),
        ("modernbert", {"global_attn_every_n_layers": "x"}),
        ("modernbert", {"local_attention": 0}),
        ("gemma3_text", {"sliding_window_pattern": 0}),
    ],
)
def test_a_size_that_is_none(family, config):
    (name,) = config
    with pytest.raises(ModelLoadError, match=f"{name} is .* in config.json; it must be at least 1"):
        complete(config, ROWS[family])


def test_kinds_that_are_not_run():
    with pytest.raises(ModelLoadError, match="names 'chunked_attention'"):
        complete({"num_hidden_layers": 1, "layer_types": ["chunked_attention"]}, ROWS["qwen3"])
    with pytest.raises(ModelLoadError, match="pos_att_type is 3"):
        complete({"pos_att_type": 3}, ROWS["deberta-v2"])


@pytest.mark.parametrize(
    ("family", "config"),
    [("gte", {"rope_theta": "x"}), ("jina_embeddings_v3", {"rotary_emb_base": "x"}), ("nomic_bert", {"n_embd": "x"})],
)
def test_terms_that_cannot_be_translated(family, config):
    with pytest.raises(ModelLoadError, match=r"m: config\.json cannot be read"):
        translate(ROWS[family], config, "m")


@pytest.mark.parametrize("value", [["full_attention"], "full_attention"])
def test_kinds_of_layers_that_are_not_one_for_each(value):
    with pytest.raises(ModelLoadError, match="each of 4 layers"):
        complete({"num_hidden_layers": 4, "layer_types": value}, ROWS["qwen3"])


def test_null_where_the_class_has_a_number_is_its_default():
    assert complete({"layer_norm_eps": None}, ROWS["bert"])["layer_norm_eps"] == 1e-12
    assert complete({"rope_theta": None}, ROWS["llama"])["rope_parameters"]["rope_theta"] == 10_000


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": "1e4"},
        {"rope_theta": -1},
        {"rope_scaling": {"type": "linear", "factor": None}},
        {"rope_scaling": {"type": "linear", "factor": 0}},
        {"rope_parameters": {"rope_theta": True}},
        {"rope_scaling": [1]},
    ],
)
def test_rotary_positions_that_are_no_numbers(config):
    with pytest.raises(ModelLoadError, match="rotary positions|must be objects"):
        complete(config, ROWS["llama"])
