"""Broken checkpoints, each with its own clear error; and what a fingerprint depends on."""

import json
import os
import pickle
import shutil

import pytest
from tests.tiny import Dense, Layout, Normalize, Pooling, drop_tensor, edit_json, truncate_file, write_checkpoint

from millpond import Engine
from millpond.checkpoints.checkpoint import merge, read_checkpoint
from millpond.checkpoints.resolve import resolve
from millpond.engine.loading import describe
from millpond.errors import ModelLoadError, UnsupportedArchitectureError, WeightMismatchError
from millpond.values.config import EngineConfig


@pytest.fixture
def folder(tmp_path):
    return write_checkpoint(tmp_path / "model", "bert")


def load(folder, **options):
    with Engine(folder, device="cpu", dtype="float32", **options) as engine:
        return engine.spec


def test_a_hub_id_that_cannot_be_reached():
    with pytest.raises(ModelLoadError, match=r"nobody/nothing .*pass a folder"):
        resolve("nobody/nothing")


@pytest.mark.parametrize(
    "name", ["./missing", "a/b/c", "~/missing", "~nobody-of-that-name/model", "..", "with\\backslash"]
)
def test_a_name_that_is_neither_folder_nor_hub_id(name, tmp_path, monkeypatch):
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
        ({"is_decoder": True}, "is_decoder True, which millpond does not run for BertModel"),
        ({"add_cross_attention": True}, "add_cross_attention True"),
    ],
)
def test_unsupported_configs_are_refused_by_name(folder, fields, message):
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


def test_an_activation_that_is_the_checkpoints_own_code(tmp_path):
    layout = Layout(modules=(Pooling(), Dense(out_features=20)))
    folder = write_checkpoint(tmp_path / "model", "bert", sentence_transformers=layout)
    config = next(path for path in folder.glob("*Dense/config.json"))
    for name in ("os.system", "torch.nn.functional.gelu", "torch.nn.Linear"):
        edit_json(config, activation_function=name)
        with pytest.raises(ModelLoadError, match=name):
            load(folder)


def test_plain_repositories_are_pooled_as_their_family(tmp_path):
    expected = {"bert": "cls", "distilbert": "mean", "modernbert": "cls", "qwen3": "lasttoken", "llama": "lasttoken"}
    for family, mode in expected.items():
        spec = load(write_checkpoint(tmp_path / family, family))
        assert (spec.pooling, spec.normalize) == ((mode,), True)


def test_the_users_options_have_precedence(tmp_path):
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


def test_the_fingerprint_depends_on_everything_that_changes_a_vector(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    base = load(folder).fingerprint
    assert load(copy).fingerprint == base  # the folder's name does not count
    assert load(folder, pooling="mean").fingerprint != base
    assert load(folder, max_length=10).fingerprint != base
    assert load(folder, normalize=False).fingerprint == base  # stored rows are not normalized
    assert load(folder, hf_overrides={"is_matryoshka": True}).fingerprint == base  # nor truncated
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


def test_a_bert_that_its_config_calls_a_decoder_can_still_be_run_both_ways(folder):
    edit_json(folder / "config.json", is_decoder=True)
    assert load(folder, hf_overrides={"is_decoder": False}).model_type == "bert"


VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "sentencepiece.bpe.model",
    "spiece.model",
    "qwen.tiktoken",
    "chat_template.jinja",
)


@pytest.mark.parametrize("name", VOCABULARY_FILES)
def test_the_fingerprint_reads_every_file_a_tokenizer_is_made_of(folder, name):
    before = read_checkpoint(folder).digest()
    path = folder / name
    path.write_bytes((path.read_bytes() if path.exists() else b"") + b" ")
    assert read_checkpoint(folder).digest() != before
    (folder / "training_log.txt").write_text("not the model's")
    after = read_checkpoint(folder).digest()
    path.write_bytes(path.read_bytes() + b" ")
    assert read_checkpoint(folder).digest() != after


def test_a_changed_merges_file_gives_no_vectors_of_the_old_one(tmp_path):
    """In a cache, two tokenizers under one fingerprint would share vectors."""
    folder = write_checkpoint(tmp_path / "model", "roberta")
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (folder / "tokenizer.json").unlink()
    with Engine(folder, device="cpu", dtype="float32", cache=tmp_path / "c.db") as engine:
        first = engine.embed(["The pond is deep."])
    (folder / "merges.txt").write_text("#version: 0.2\n")
    with Engine(folder, device="cpu", dtype="float32", cache=tmp_path / "c.db") as engine:
        second = engine.embed(["The pond is deep."])
    assert second.usage.prompt_tokens > first.usage.prompt_tokens and not second.cached.any()


@pytest.mark.parametrize("how", ["in place", "by another file", "of the same time", "gone", "one more"])
def test_a_model_overwritten_since_it_was_loaded_has_no_fingerprint(folder, tmp_path, how):
    """Computed now, it would be that of the new weights, and the cache would hold vectors of the old ones under it."""
    weights = folder / "model.safetensors"
    with Engine(folder, device="cpu", dtype="float32", cache=tmp_path / "c.db") as engine:
        old, other = weights.stat(), write_checkpoint(tmp_path / "other", "bert", seed=1) / "model.safetensors"
        match how:
            case "in place":
                weights.write_bytes(other.read_bytes())
                os.utime(weights, ns=(old.st_atime_ns, old.st_mtime_ns + 1))
            case "by another file":
                os.replace(other, weights)
            case "of the same time":
                os.utime(other, ns=(old.st_atime_ns, old.st_mtime_ns))
                os.replace(other, weights)
            case "gone":
                weights.unlink()
            case "one more":
                os.replace(other, folder / "model-2.safetensors")
        for _ in range(2):  # the error is not cached as a fingerprint
            with pytest.raises(
                ModelLoadError, match=r"model(-2)?\.safetensors has changed since .* load the model again"
            ):
                engine.embed(["a text"])
    if how not in ("gone", "one more"):
        with Engine(folder, device="cpu", dtype="float32", cache=tmp_path / "c.db") as engine:
            assert not engine.embed(["a text"]).cached.any()


def test_a_folder_removed_since_it_was_loaded_has_no_fingerprint(folder):
    with Engine(folder, device="cpu", dtype="float32") as engine:
        shutil.rmtree(folder)
        assert len(engine.embed(["a text"]).embeddings) == 1  # which needs no fingerprint
        with pytest.raises(ModelLoadError, match="load the model again"):
            _ = engine.spec.fingerprint


def test_a_fingerprint_that_was_computed_stays_that_of_the_weights_in_memory(folder):
    with Engine(folder, device="cpu", dtype="float32") as engine:
        known = engine.spec.fingerprint
        (folder / "model.safetensors").unlink()
        assert engine.spec.fingerprint == known


def test_a_spec_can_be_pickled_and_hashed(folder):
    edit_json(folder / "config.json", pad_token_id=0)
    spec = load(folder)
    copy = pickle.loads(pickle.dumps(spec))
    assert copy == spec and copy.fingerprint == spec.fingerprint
    assert {spec: 1}[copy] == 1 and hash(load(folder, max_length=10)) != hash(spec)


def test_weights_from_before_torch_1_6(tmp_path):
    import torch

    from millpond.checkpoints.weights import read_tensors, tensor_shapes

    tensors = {"a": torch.ones(2, 3), "b": torch.arange(4)}
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert tensor_shapes(tmp_path) == {"a": (2, 3), "b": (4,)}
    assert torch.equal(read_tensors(tmp_path, only=("b",))["b"], tensors["b"])


@pytest.mark.parametrize("kind", ["safetensors", "sharded", "bin"])
def test_rows_of_a_matrix(tmp_path, kind):
    import json

    import torch
    from safetensors.torch import save_file

    from millpond.checkpoints.weights import read_rows

    table = torch.arange(30.0).reshape(10, 3)
    if kind == "bin":
        torch.save({"head.weight": table}, tmp_path / "pytorch_model.bin")
    elif kind == "safetensors":
        save_file({"head.weight": table, "other": torch.ones(2)}, tmp_path / "model.safetensors")
    else:
        save_file({"other": torch.ones(2)}, tmp_path / "model-00001-of-00002.safetensors")
        save_file({"head.weight": table}, tmp_path / "model-00002-of-00002.safetensors")
        shards = {"other": "model-00001-of-00002.safetensors", "head.weight": "model-00002-of-00002.safetensors"}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert torch.equal(read_rows(tmp_path, "head.weight", (7, 2)), table[[7, 2]])


def test_a_missing_shard_and_an_index_without_a_map(tmp_path):
    import json

    from millpond.checkpoints.weights import tensor_shapes

    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00001.safetensors"}}))
    with pytest.raises(ModelLoadError, match=r"lacks model-00001-of-00001\.safetensors"):
        tensor_shapes(tmp_path)
    index.write_text("{}")
    with pytest.raises(ModelLoadError, match="no weight_map"):
        tensor_shapes(tmp_path)


def test_one_architecture_may_be_a_str(tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    edit_json(folder / "config.json", architectures="BertModel")
    assert describe(EngineConfig(model=str(folder))).architecture == "BertModel"


def test_jina_s_instructions_are_prompts(tmp_path):
    folder = write_checkpoint(tmp_path / "model")
    edit_json(folder / "config.json", task_instructions={"retrieval.query": "Represent the query: "})
    assert describe(EngineConfig(model=str(folder))).prompts == {"retrieval.query": "Represent the query: "}
