"""Checkpoints that are wrong, each with its own clear error; and what makes a fingerprint."""

import json
import shutil

import pytest
from tests.tiny import Dense, Layout, Normalize, Pooling, drop_tensor, edit_json, truncate_file, write_checkpoint

from millpond.checkpoints.checkpoint import merge, read_checkpoint
from millpond.checkpoints.resolve import resolve
from millpond.engine.engine import Engine
from millpond.errors import ModelLoadError, UnsupportedArchitectureError, WeightMismatchError


@pytest.fixture
def folder(tmp_path):
    return write_checkpoint(tmp_path / "model", "bert")


def load(folder, **options):
    with Engine(folder, device="cpu", dtype="float32", **options) as engine:
        return engine.spec


def test_a_hub_id_that_cannot_be_had():
    with pytest.raises(ModelLoadError, match=r"nobody/nothing .*pass a folder"):
        resolve("nobody/nothing")


@pytest.mark.parametrize("name", ["./missing", "a/b/c", "~/missing", "..", "with\\backslash"])
def test_what_is_neither_folder_nor_hub_id(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match=r"no hub id|missing"):
        read_checkpoint(name)


def test_a_file_is_no_checkpoint(folder):
    with pytest.raises(ModelLoadError, match="is a file; pass the folder"):
        load(folder / "config.json")


def test_a_revision_of_a_folder(folder):
    with pytest.raises(ModelLoadError, match="revision='main' means nothing"):
        load(folder, revision="main")


def test_broken_json_names_the_file(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json is not readable JSON"):
        load(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match=r"config\.json holds a list"):
        load(folder)


def test_truncated_weights(folder):
    truncate_file(folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"weight file|could not be loaded"):
        load(folder)


def test_missing_weights(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="could not be loaded"):
        load(folder)


def test_a_missing_tensor(folder):
    drop_tensor(folder, "encoder.layer.1.output.dense.weight")
    with pytest.raises(WeightMismatchError, match=r"misses encoder\.layer\.1\.output\.dense\.weight"):
        load(folder)


def test_more_layers_in_the_file_than_in_the_config(folder):
    edit_json(folder / "config.json", num_hidden_layers=1)
    with pytest.raises(WeightMismatchError, match=r"does not know encoder\.layer\.1"):
        load(folder)


def test_a_tensor_of_another_shape(folder):
    edit_json(folder / "config.json", intermediate_size=64)
    with pytest.raises(WeightMismatchError, match="shape"):
        load(folder)


def test_no_tokenizer(folder):
    for path in (*folder.glob("tokenizer*"), *folder.glob("vocab*"), *folder.glob("special*")):
        path.unlink()
    with pytest.raises(ModelLoadError, match="no tokenizer that can be read"):
        load(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "warpnet", "architectures": ["WarpNetModel"]}, "WarpNetModel of model_type 'warpnet'"),
        ({"model_type": "newer", "auto_map": {"AutoModel": "x.Y"}}, "needs code of its own"),
        ({"architectures": ["BertForQuestionAnswering"]}, "BertForQuestionAnswering, which millpond does not run"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type 'alibi'"),
        ({"lora_adaptations": ["a"]}, "lora_adaptations"),
    ],
)
def test_what_is_refused_by_name(folder, fields, message):
    edit_json(folder / "config.json", **fields)
    with pytest.raises(UnsupportedArchitectureError, match=message):
        load(folder)


def test_a_dynamic_rope_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "llama")
    edit_json(folder / "config.json", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    with pytest.raises(UnsupportedArchitectureError, match="rope scaling 'dynamic'"):
        load(folder)


def test_a_dense_that_does_not_fit(tmp_path):
    layout = Layout(modules=(Pooling(), Dense(out_features=20)))
    folder = write_checkpoint(tmp_path / "model", "bert", sentence_transformers=layout)
    config = next(path for path in folder.glob("*Dense/config.json"))
    edit_json(config, in_features=47)
    with pytest.raises(ModelLoadError, match="takes 47 features, and gets 48"):
        load(folder)
    edit_json(config, in_features=48, out_features=21)
    with pytest.raises(WeightMismatchError, match="Dense"):
        load(folder)


def test_an_activation_of_the_checkpoints_own(tmp_path):
    layout = Layout(modules=(Pooling(), Dense(out_features=20)))
    folder = write_checkpoint(tmp_path / "model", "bert", sentence_transformers=layout)
    config = next(path for path in folder.glob("*Dense/config.json"))
    for name in ("os.system", "torch.nn.functional.gelu", "torch.nn.Linear"):
        edit_json(config, activation_function=name)
        with pytest.raises(ModelLoadError, match=name):
            load(folder)


def test_plain_repositories_follow_their_family(tmp_path):
    expected = {"bert": "cls", "distilbert": "mean", "modernbert": "cls", "qwen3": "lasttoken", "llama": "lasttoken"}
    for family, mode in expected.items():
        spec = load(write_checkpoint(tmp_path / family, family))
        assert (spec.pooling, spec.normalize) == ((mode,), True)


def test_what_the_user_says_wins(tmp_path):
    layout = Layout(modules=(Pooling(), Normalize()))
    folder = write_checkpoint(tmp_path / "model", "bert", sentence_transformers=layout)
    assert (load(folder).pooling, load(folder).normalize) == (("mean",), True)
    spec = load(folder, pooling="cls+max", normalize=False, max_length=12)
    assert (spec.pooling, spec.normalize, spec.dimensions, spec.max_length) == (("cls", "max"), False, 96, 12)
    with pytest.raises(ModelLoadError, match=r"pooling='median' is unknown; choose cls"):
        load(folder, pooling="median")


def test_declared_matryoshka_widths(folder):
    edit_json(folder / "config.json", matryoshka_dimensions=[16, 32])
    assert load(folder).matryoshka_dimensions == (16, 32)
    forced = load(folder, hf_overrides={"is_matryoshka": True})
    assert forced.matryoshka and forced.matryoshka_dimensions is None
    assert not load(folder, hf_overrides={"is_matryoshka": False}).matryoshka


def test_overrides_are_merged_deeply():
    assert merge({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"c": 4}, "e": 5}) == {"a": {"b": 1, "c": 4}, "d": 3, "e": 5}


def test_the_fingerprint_knows_what_changes_a_vector(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    base = load(folder).fingerprint
    assert load(copy).fingerprint == base  # the folder's name is nothing
    assert load(folder, pooling="mean").fingerprint != base
    assert load(folder, max_length=10).fingerprint != base
    assert load(folder, normalize=False).fingerprint == base  # stored rows are not normalized
    assert load(folder, hf_overrides={"is_matryoshka": True}).fingerprint == base  # nor cut
    assert load(folder, hf_overrides={"layer_norm_eps": 1e-3}).fingerprint != base
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    assert load(copy).fingerprint != base
    shutil.rmtree(copy)
    shutil.copytree(folder, copy)
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["normalizer"] = None
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert load(copy).fingerprint != base
