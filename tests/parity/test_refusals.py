"""Checkpoints that cannot be run correctly are refused with a specific error that names the problem."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tests.tiny import (
    FAMILIES,
    Dense,
    LayerNorm,
    Layout,
    Normalize,
    Other,
    Pooling,
    drop_tensor,
    edit_json,
    truncate_file,
    write_checkpoint,
)

from millpond.engine.engine import Engine
from millpond.errors import ModelLoadError, UnsupportedArchitectureError, WeightMismatchError

HEADS = Layout(modules=(Pooling(), Dense(out_features=8), LayerNorm()))


def refused(folder: Path, error: type[Exception], match: str) -> None:
    """Loading must fail with exactly this class (no subclass), and the message names problem and file."""
    with pytest.raises(error, match=match) as caught:
        Engine(folder, dtype="float32", device="cpu")
    assert caught.type is error


# --- The backbone ---------------------------------------------------------------------------------------------------

MISSING = {
    "bert": "encoder.layer.1.output.dense.weight",
    "modernbert": "layers.2.attn.Wqkv.weight",
    "llama": "layers.0.self_attn.q_proj.weight",
    "gemma2": "norm.weight",
}


@pytest.mark.parametrize("family", MISSING)
def test_a_missing_tensor(family, tmp_path):
    folder = write_checkpoint(tmp_path / "model", family)
    drop_tensor(folder, MISSING[family])
    refused(folder, WeightMismatchError, MISSING[family].replace(".", r"\."))


def test_a_tensor_of_another_shape(tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["encoder.layer.0.attention.self.query.weight"] = tensors["encoder.layer.0.attention.self.query.weight"][:24]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refused(folder, WeightMismatchError, r"attention\.self\.query\.weight")


def test_a_tensor_that_the_class_does_not_know(tmp_path):
    """The config has two layers and the file three, so they do not belong together."""
    folder = write_checkpoint(tmp_path / "model", config={"num_hidden_layers": 3})
    edit_json(folder / "config.json", num_hidden_layers=2)
    refused(folder, WeightMismatchError, r"encoder\.layer\.2\.")


def test_fewer_layers_than_the_config_says(tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    edit_json(folder / "config.json", num_hidden_layers=3)
    refused(folder, WeightMismatchError, r"encoder\.layer\.2\.")


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.5, 0.999])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_download_that_was_interrupted(kind, keep, tmp_path):
    folder = write_checkpoint(tmp_path / "model", weights=kind)
    truncate_file(folder / ("model.safetensors" if kind == "safetensors" else "pytorch_model.bin"), keep=keep)
    refused(folder, ModelLoadError, str(folder))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file(name, tmp_path):
    folder = write_checkpoint(tmp_path / "model", "modernbert")
    (folder / name).unlink()
    refused(folder, ModelLoadError, str(folder))


@pytest.mark.parametrize("content", ["", "{", "[]", '"bert"', "\x00\x01"])
def test_a_config_that_is_no_object(content, tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    (folder / "config.json").write_text(content)
    refused(folder, ModelLoadError, r"config\.json")


def test_a_pickle_that_is_more_than_tensors(tmp_path):
    """The code in it must not run: pickles are only read with ``weights_only``."""
    import pickle

    ran = tmp_path / "ran"

    class Harm:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[Path]]:
            return Path.touch, (ran,)

    folder = write_checkpoint(tmp_path / "model", weights="bin")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"embeddings.word_embeddings.weight": Harm()}))
    refused(folder, ModelLoadError, str(folder))
    assert not ran.exists()


# --- The architecture -----------------------------------------------------------------------------------------------


def test_an_unknown_architecture(tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    edit_json(folder / "config.json", model_type="pondformer", architectures=["PondformerModel"])
    refused(folder, UnsupportedArchitectureError, r"PondformerModel.*pondformer.*it runs bert")


def test_code_of_the_checkpoints_own(tmp_path):
    """The error names the code, which would leave a file if it were run."""
    folder = write_checkpoint(tmp_path / "model")
    trace = tmp_path / "ran"
    (folder / "modeling_pond.py").write_text(f"open({str(trace)!r}, 'w').close()\nclass PondModel: ...\n")
    edit_json(
        folder / "config.json",
        model_type="pondformer",
        architectures=["PondModel"],
        auto_map={"AutoModel": "modeling_pond.PondModel", "AutoConfig": "modeling_pond.PondConfig"},
    )
    refused(folder, UnsupportedArchitectureError, "auto_map")
    assert not trace.exists()


def test_a_native_architectures_own_code_is_left_alone(tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    trace = tmp_path / "ran"
    (folder / "modeling_pond.py").write_text(f"open({str(trace)!r}, 'w').close()\n")
    edit_json(folder / "config.json", auto_map={"AutoModel": "modeling_pond.PondModel"})
    with Engine(folder, dtype="float32", device="cpu") as engine:
        assert engine.embed(["a"]).embeddings.shape == (1, 48)
    assert not trace.exists()


@pytest.mark.parametrize("head", ["ForQuestionAnswering", "ForMultipleChoice"])
@pytest.mark.parametrize("family", ["bert", "modernbert", "jina", "llama", "qwen3", "gpt2"])
def test_a_class_with_another_head(family, head, tmp_path):
    folder = write_checkpoint(tmp_path / "model", family)
    claimed = FAMILIES[family].prefix + head
    edit_json(folder / "config.json", architectures=[claimed])
    refused(folder, UnsupportedArchitectureError, claimed)


@pytest.mark.parametrize(
    ("family", "fields", "match"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "relative_key"),
        ("roberta", {"position_embedding_type": "rotary"}, "rotary"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("qwen2", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "dynamic", "factor": 2.0}}}, "dynamic"),
    ],
)
def test_a_config_that_changes_the_arithmetic(family, fields, match, tmp_path):
    folder = write_checkpoint(tmp_path / "model", family)
    edit_json(folder / "config.json", **fields)
    refused(folder, UnsupportedArchitectureError, match)


def test_rotary_positions_that_the_weights_do_not_have(tmp_path):
    """With rotary positions an XLM-RoBERTa is jina's model, whose tensors have other names."""
    folder = write_checkpoint(tmp_path / "model", "xlm-roberta")
    edit_json(folder / "config.json", position_embedding_type="rotary")
    refused(folder, WeightMismatchError, r"misses layers\.0\.")


# --- The modules ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("module", "name"), [("2_Dense", "linear.bias"), ("3_LayerNorm", "norm.weight")])
def test_a_missing_tensor_of_a_module(module, name, tmp_path):
    folder = write_checkpoint(tmp_path / "model", sentence_transformers=HEADS)
    drop_tensor(folder / module, name)
    refused(folder, WeightMismatchError, rf"(?s){module}.*{name}")


def test_a_tensor_that_a_module_does_not_know(tmp_path):
    folder = write_checkpoint(tmp_path / "model", sentence_transformers=HEADS)
    edit_json(folder / "2_Dense" / "config.json", bias=False)
    refused(folder, WeightMismatchError, r"(?s)2_Dense.*linear\.bias")


@pytest.mark.parametrize("weights", ["safetensors", "bin"])
def test_damaged_weights_of_a_module(weights, tmp_path):
    layout = Layout(modules=HEADS.modules, weights=weights)
    folder = write_checkpoint(tmp_path / "model", sentence_transformers=layout)
    truncate_file(next((folder / "2_Dense").glob("*model.*")))
    refused(folder, ModelLoadError, "2_Dense.*damaged")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_missing_file_of_a_module(name, tmp_path):
    folder = write_checkpoint(tmp_path / "model", sentence_transformers=HEADS)
    (folder / "2_Dense" / name).unlink()
    refused(folder, ModelLoadError, "2_Dense")


@pytest.mark.parametrize("content", ["", "{}", "[]", "[1]", '[{"idx": 0}]'])
def test_a_list_of_modules_that_is_none(content, tmp_path):
    folder = write_checkpoint(tmp_path / "model", sentence_transformers=Layout())
    (folder / "modules.json").write_text(content)
    refused(folder, ModelLoadError, r"modules\.json")


def test_a_list_without_a_pooling(tmp_path):
    folder = write_checkpoint(tmp_path / "model", sentence_transformers=Layout())
    entries = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(entries[:1]))
    refused(folder, ModelLoadError, "no Pooling")


@pytest.mark.parametrize(
    "fields", [{"prompts": ["query: "]}, {"prompts": {"query": 3}}, {"prompts": {}, "default_prompt_name": "other"}]
)
def test_invalid_prompts(fields, tmp_path):
    folder = write_checkpoint(tmp_path / "model", sentence_transformers=Layout())
    edit_json(folder / "config_sentence_transformers.json", **fields)
    refused(folder, ModelLoadError, "prompt")


# --- Modules that would have to be skipped --------------------------------------------------------------------------

UNKNOWN = (
    "WordEmbeddings",
    "CNN",
    "LSTM",
    "BoW",
    "WordWeights",
    "WeightedLayerPooling",
    "StaticEmbedding",
    "Router",
    "Asym",
    "CLIPModel",
)


@pytest.mark.parametrize("place", ["first", "before", "after"])
@pytest.mark.parametrize("name", UNKNOWN)
def test_other_modules_are_refused_by_name(name, place, tmp_path):
    other = Other(dotted=f"sentence_transformers.models.{name}")
    modules = (Pooling(), other) if place == "after" else (other, Pooling())
    folder = write_checkpoint(tmp_path / "model", sentence_transformers=Layout(modules=modules, style="old"))
    if place == "first":
        path = folder / "modules.json"
        path.write_text(json.dumps([{**entry, "idx": i} for i, entry in enumerate(json.loads(path.read_text())[1:])]))
    with pytest.raises(ModelLoadError, match=rf"{name}\b.*millpond does not run"):
        Engine(folder, device="cpu")


@pytest.mark.parametrize("dotted", ["custom_st.Transformer", "jinaai/code--custom_st.Pooling", "modeling.MyHead"])
def test_code_of_the_checkpoints_own_is_refused(dotted, tmp_path):
    folder = write_checkpoint(
        tmp_path / "model", sentence_transformers=Layout(modules=(Pooling(), Other(dotted=dotted)))
    )
    with pytest.raises(ModelLoadError, match=dotted):
        Engine(folder, device="cpu")


def test_a_second_pooling_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "model", sentence_transformers=Layout(modules=(Pooling(), Pooling())))
    with pytest.raises(ModelLoadError, match="Pooling"):
        Engine(folder, device="cpu")


@pytest.mark.parametrize(
    "activation",
    ["my_package.Swish", "torch.nn.functional.gelu", "torch.nn.modules.activation.MultiheadAttention", "os.system"],
)
def test_an_activation_that_is_no_plain_torch_module_is_refused(activation, tmp_path):
    modules = (Pooling(), Dense(out_features=8, activation=activation))
    folder = write_checkpoint(tmp_path / "model", sentence_transformers=Layout(modules=modules))
    with pytest.raises(ModelLoadError, match=activation.rsplit(".", 1)[-1]):
        Engine(folder, device="cpu")


@pytest.mark.parametrize("style", ["old", "new"])
def test_an_unknown_pooling_mode_is_refused(style, tmp_path):
    folder = write_checkpoint(tmp_path / "model", sentence_transformers=Layout(style=style))
    mode = {"pooling_mode": "median"} if style == "new" else {"pooling_mode_median_tokens": True}
    edit_json(folder / "1_Pooling" / "config.json", **mode)
    with pytest.raises(ModelLoadError, match="median"):
        Engine(folder, device="cpu")


def test_no_pooling_mode_at_all_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "model", sentence_transformers=Layout())
    edit_json(folder / "1_Pooling" / "config.json", pooling_mode=[])
    with pytest.raises(ModelLoadError, match="switches every pooling mode off"):
        Engine(folder, device="cpu")


@pytest.mark.parametrize(("place", "name"), [(2, "Dense"), (3, "Normalize")])
def test_a_module_on_rows_of_another_kind_is_refused(place, name, tmp_path):
    """After pooling, a module on token rows has no effect on the vector, which contradicts the list of modules."""
    modules = (Pooling(), Dense(out_features=48), Normalize())
    folder = write_checkpoint(tmp_path / "model", sentence_transformers=Layout(modules=modules))
    rows = dict.fromkeys(("module_input_name", "module_output_name"), "token_embeddings")
    edit_json(folder / f"{place}_{name}" / "config.json", **rows)
    with pytest.raises(ModelLoadError, match=f"{name}.*token_embeddings"):
        Engine(folder, device="cpu")


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("CrossEncoder", "lists Pooling behind a Transformer"),
        ("SparseEncoder", "SparseEncoder"),
        ("MultiVectorEncoder", "MultiVectorEncoder"),
    ],
)
def test_other_kinds_of_checkpoints_need_their_own_modules(kind, match, tmp_path):
    """The modules of an embedder do not fit a config that names another kind of model."""
    folder = write_checkpoint(tmp_path / "model", sentence_transformers=Layout())
    edit_json(folder / "config_sentence_transformers.json", model_type=kind)
    with pytest.raises(ModelLoadError, match=match):
        Engine(folder, device="cpu")


def test_widths_that_do_not_fit_are_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "model", sentence_transformers=HEADS)
    edit_json(folder / "2_Dense" / "config.json", in_features=47)
    with pytest.raises(ModelLoadError, match=r"47 features, and gets 48"):
        Engine(folder, device="cpu")
