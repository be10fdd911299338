"""Broken checkpoints, each with its own clear error; and what a fingerprint depends on."""

import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.tiny import TEXTS, Layout, Normalize, Pooling, edit_json, write_checkpoint

from millpond import Engine
from millpond.checkpoints.checkpoint import read_checkpoint
from millpond.checkpoints.resolve import resolve
from millpond.checkpoints.weights import tensor_shapes
from millpond.engine.loading import describe
from millpond.errors import ModelLoadError, UnsupportedArchitectureError
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
    inner = tmp_path / "outer" / "inner"  # beside tmp_path are the folders of other tests
    inner.mkdir(parents=True)
    monkeypatch.chdir(inner)
    with pytest.raises(ModelLoadError, match=r"no hub id|missing|neither|has no files"):
        read_checkpoint(name)


def test_a_file_is_no_checkpoint(folder):
    with pytest.raises(ModelLoadError, match="is a file; pass the folder"):
        load(folder / "config.json")


def test_a_revision_of_a_folder(folder):
    with pytest.raises(ModelLoadError, match="revision='main' means nothing"):
        load(folder, revision="main")


def test_no_tokenizer(folder):
    for path in (*folder.glob("tokenizer*"), *folder.glob("vocab*"), *folder.glob("special*")):
        path.unlink()
    with pytest.raises(ModelLoadError, match="no tokenizer that can be read"):
        load(folder)


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
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json vocab.txt merges.txt "
    "sentencepiece.bpe.model qwen.tiktoken chat_template.jinja"
).split()


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


@pytest.mark.torch
def test_weights_from_before_torch_1_6(tmp_path):
    import torch

    from millpond.backends.torch.weights import read_tensors

    tensors = {"a": torch.ones(2, 3), "b": torch.arange(4)}
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert tensor_shapes(tmp_path) == {"a": (2, 3), "b": (4,)}
    assert torch.equal(read_tensors(tmp_path, only=("b",))["b"], tensors["b"])


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["safetensors", "sharded", "bin"])
def test_rows_of_a_matrix(tmp_path, kind):
    import torch
    from safetensors.torch import save_file

    from millpond.backends.torch.weights import read_rows

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


def test_contriever_is_a_bert_that_is_pooled_by_the_mean(tmp_path: Path) -> None:
    """facebook/contriever names a class of its own and no pooling, which the paper and its card say."""
    folder = write_checkpoint(tmp_path / "bert", "bert")
    with Engine(folder, pooling="mean") as engine:
        expected = engine.embed(TEXTS).embeddings
    edit_json(folder / "config.json", architectures=["Contriever"])
    with Engine(folder) as engine, Engine(folder, pooling="cls") as first:
        np.testing.assert_array_equal(engine.embed(TEXTS).embeddings, expected)
        assert np.abs(first.embed(TEXTS).embeddings - expected).max() > 0.01


def test_a_config_that_names_only_its_own_class_is_of_that_family(tmp_path: Path) -> None:
    """jina-reranker-v2-base-multilingual has no model_type."""
    folder = write_checkpoint(tmp_path / "model", "xlm-roberta")
    with Engine(folder) as engine:
        expected = engine.embed(TEXTS).embeddings
    own = {"AutoConfig": "configuration_xlm_roberta.XLMRobertaFlashConfig"}
    edit_json(folder / "config.json", model_type=None, auto_map=own)
    with Engine(folder) as engine:
        np.testing.assert_array_equal(engine.embed(TEXTS).embeddings, expected)
    edit_json(folder / "config.json", auto_map={"AutoConfig": "configuration.Mine"})
    with pytest.raises(UnsupportedArchitectureError, match="no model_type"):
        Engine(folder)
