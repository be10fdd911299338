"""Code of a checkpoint's own beside a family of millpond's: what is known of it runs, all other is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tests.parity.oracles import without_mask
from tests.parity.test_backbones import SHORT, TOLERANCE, VISIBLE, difference, expected_of, ids_of, states
from tests.tiny import FAMILIES, Layout, Normalize, Pooling, edit_json, write_checkpoint

from millpond import Engine
from millpond.errors import UnsupportedArchitectureError

pytestmark = pytest.mark.contract

GRITLM = {"AutoModel": "modeling_gritlm7b.MistralModel", "AutoModelForCausalLM": "modeling_gritlm7b.MistralForCausalLM"}
GTE = {"AutoModel": "modeling_qwen.Qwen2Model", "AutoModelForCausalLM": "modeling_qwen.Qwen2ForCausalLM"}
FLASH = "jinaai/xlm-roberta-flash-implementation"
KALM = {"AutoModel": "modeling.Qwen2Model"}


def engine(folder, **options):
    return Engine(folder, dtype="float32", device="cpu", **options)


def both_ways(folder):
    """States of the texts with every token attending to every other one, and with the causal mask."""
    with torch.inference_mode():
        return [[model(ids).numpy() for ids in ids_of(folder, SHORT)] for model in without_mask(folder)]


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(
    ("family", "name", "own", "fields", "bidirectional"),
    [
        ("mistral", "GritLM-7B", GRITLM, {}, True),
        ("qwen2", "gte-Qwen2-7B-instruct", GTE, {}, True),
        ("qwen2", "causal-qwen2", GTE, {"is_causal": True}, False),
        ("qwen2", "KaLM-embedding-mini-instruct-v2", KALM, {}, True),
        ("llama", "nv-embedqa", {"AutoModel": "llama_bidirectional_model.LlamaBidirectionalModel"}, {}, True),
    ],
)
def test_known_code(backend, family, name, own, fields, bidirectional, tmp_path):
    folder = write_checkpoint(tmp_path / name, family)
    right, wrong = both_ways(folder)[:: 1 if bidirectional else -1]
    edit_json(folder / "config.json", auto_map=own, **fields)
    with engine(folder, backend=backend) as loaded:
        found = states(loaded, SHORT)
    assert difference(found, right) <= TOLERANCE
    assert difference(found, wrong) > VISIBLE


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_gritlm_leaves_the_instruction_out_of_the_mean(backend, tmp_path):
    folder = write_checkpoint(tmp_path / "gritlm", "mistral")
    rows, _ = both_ways(folder)
    edit_json(folder / "config.json", auto_map=GRITLM)
    with engine(folder, backend=backend) as loaded:
        assert (loaded.spec.pooling, loaded.spec.normalize) == (("mean",), True)
        plain = loaded.embed(SHORT).embeddings
        prompted = loaded.embed(SHORT[1:2], prompt="The pond ").embeddings[0]
    means = np.stack([row.mean(0) for row in rows])
    assert np.abs(plain - means / np.linalg.norm(means, axis=1, keepdims=True)).max() <= TOLERANCE
    (ids,), (lead,) = ids_of(folder, [f"The pond {SHORT[1]}"]), ids_of(folder, ["The pond "])
    lead = lead[:-1]  # without the token that ends a text
    with torch.inference_mode():
        whole = without_mask(folder)[0](ids).numpy()
    expected, control = whole[len(lead) :].mean(0), whole.mean(0)
    assert np.abs(prompted - expected / np.linalg.norm(expected)).max() <= TOLERANCE
    assert np.abs(prompted - control / np.linalg.norm(control)).max() > VISIBLE


@pytest.mark.parametrize("ends", [True, False])
def test_gte_qwen2s_own_tokenizer_ends_a_text(ends, tmp_path):
    folder = write_checkpoint(tmp_path / "gte", "qwen2", template="$A")
    own = {"AutoTokenizer": ["tokenization_qwen.Qwen2Tokenizer", "tokenization_qwen.Qwen2TokenizerFast"]}
    edit_json(folder / "tokenizer_config.json", add_eos_token=ends, auto_map=own)
    edit_json(folder / "config.json", auto_map=GTE)
    (ids,) = ids_of(folder, SHORT[1:2])  # transformers' tokenizer ends no text
    with engine(folder) as loaded:
        assert loaded.tokenize(SHORT[1:2]) == [[*ids.tolist(), *([0] if ends else [])]]


def test_modules_have_precedence(tmp_path):
    layout = Layout(modules=(Pooling(modes=("lasttoken",)), Normalize()))
    folder = write_checkpoint(tmp_path / "gritlm", "mistral", sentence_transformers=layout)
    edit_json(folder / "config.json", auto_map=GRITLM)
    with engine(folder) as loaded:
        assert loaded.spec.pooling == ("lasttoken",)


@pytest.mark.parametrize(
    ("family", "own"),
    [
        ("qwen2", {"AutoModel": "modeling_mine.Qwen2Model"}),
        ("qwen2", {"AutoModel": "somebody/code--modeling_mine.Qwen2Model"}),
        ("qwen2", {"AutoModel": ["modeling_mine.Qwen2Model", None]}),
        ("qwen3", {"AutoModel": "modeling_qwen.Qwen2Model"}),  # known of another family
        ("qwen3", {"AutoModel": "modeling.Qwen3Model"}),
        ("qwen3", {"AutoModel": "modeling.QZhouModel"}),
        ("modernbert", {"AutoModel": "modeling_mine.ModernBertModel"}),
        ("bert", {"AutoModel": "modeling_rope_bert.RoPEBertModel"}),
        ("nomic", {"AutoModel": "modeling_mine.OtherModel"}),
    ],
)
def test_unknown_code_is_refused(family, own, tmp_path):
    folder = write_checkpoint(tmp_path / "model", family)
    edit_json(folder / "config.json", auto_map=own)
    value = next(iter(own.values()))
    named = (value if isinstance(value, str) else value[0]).rpartition("--")[2]
    with pytest.raises(UnsupportedArchitectureError, match=rf'{named} in auto_map.*"auto_map": None') as caught:
        engine(folder)
    assert ('"is_causal": False' in str(caught.value)) == family.startswith("qwen")


def test_the_override_that_the_refusal_names(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "qwen2")
    right, wrong = both_ways(folder)
    edit_json(folder / "config.json", auto_map={"AutoModel": "modeling_mine.Qwen2Model"})
    with engine(folder, hf_overrides={"auto_map": None, "is_causal": False}) as loaded:
        found = states(loaded, SHORT)
    assert difference(found, right) <= TOLERANCE < VISIBLE < difference(found, wrong)


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("where", ["", "dangvantuan/bilingual_impl--"])
@pytest.mark.parametrize("padding", [1, 0])
def test_bilingual_embedders_are_xlm_roberta(padding, where, backend, tmp_path):
    """The small one's padding has the id of the first token, which is then no position of its own."""
    folder = write_checkpoint(tmp_path / "model", "xlm-roberta")
    other = expected_of(folder, SHORT[:3])
    edit_json(folder / "config.json", pad_token_id=padding, bos_token_id=0)
    expected = expected_of(folder, SHORT[:3])
    own = {"AutoConfig": f"{where}config.BilingualConfig", "AutoModel": f"{where}modeling.BilingualModel"}
    edit_json(folder / "config.json", model_type="bilingual", architectures=["BilingualModel"], auto_map=own)
    with engine(folder, backend=backend) as loaded:
        found = states(loaded, SHORT[:3])
    assert difference(found, expected) <= TOLERANCE
    if padding == 0:
        assert difference(found, other) > VISIBLE
        edit_json(folder / "config.json", bos_token_id=None)  # then positions count from one
        with engine(folder, backend=backend) as loaded:
            assert difference(states(loaded, SHORT[:3]), expected) > VISIBLE


@pytest.mark.parametrize(
    ("family", "own", "fields"),
    [
        ("bert", {"AutoConfig": "configuration_mine.MineConfig", "AutoTokenizer": ["tokenization_mine.T", None]}, {}),
        ("qwen2", {"AutoModelForSequenceClassification": "modeling_mine.Qwen2ForSequenceClassification"}, {}),
        ("qwen2", {"AutoModel": "modeling_qwen2_rm.Qwen2ForRewardModel"}, {}),
        ("jamba", {"AutoModelForCausalLM": "modeling_jamba.JambaForCausalLM"}, {"architectures": ["JambaForCausalLM"]}),
        ("gte", {"AutoModel": "modeling.NewModel"}, {}),
        ("ultrabert", {"AutoModel": "modeling_ultrabert.UltraBertModel"}, {"architectures": ["UltraBertModel"]}),
        (
            "xlm-roberta",
            {"AutoModel": "jinaai/xlm-roberta-flash-implementation--modeling_xlm_roberta.XLMRobertaModel"},
            {},
        ),
    ],
)
def test_code_that_changes_nothing(family, own, fields, tmp_path):
    folder = write_checkpoint(tmp_path / "model", family)
    expected = expected_of(folder, SHORT[:2])
    edit_json(folder / "config.json", auto_map=own, **fields)
    with engine(folder, convert="embed") as loaded:
        assert difference(states(loaded, SHORT[:2]), expected) <= TOLERANCE


def test_a_classifier_of_unknown_code_is_refused(tmp_path):
    own = {"AutoModelForSequenceClassification": "modeling_mine.BertForSequenceClassification"}
    folder = write_checkpoint(tmp_path / "model", "bert", head="SequenceClassification")
    edit_json(folder / "config.json", auto_map=own)
    with pytest.raises(UnsupportedArchitectureError, match="modeling_mine"):
        engine(folder)


@pytest.mark.parametrize("family", [name for name, row in FAMILIES.items() if "auto_map" in row.config])
def test_the_hubs_own_layouts_load(family, tmp_path):
    folder = write_checkpoint(tmp_path / "model", family)
    assert json.loads((folder / "config.json").read_text())["auto_map"]
    with engine(folder) as loaded:
        assert np.isfinite(loaded.embed(["a"]).embeddings).all()
