"""Old and new file layouts of sentence-transformers checkpoints."""

from __future__ import annotations

import json

import pytest
from safetensors.numpy import load_file, save_file
from tests.parity.comparison import assert_same_vectors
from tests.tiny import (
    FAMILIES,
    TEXTS,
    Dense,
    Layout,
    Normalize,
    Pooling,
    write_checkpoint,
)

from millpond import Engine
from millpond.errors import WeightMismatchError

pytestmark = pytest.mark.contract  # two engines for each case, one of them a peer's

DENSE = Dense(out_features=24)


def test_the_backbone_in_a_separate_folder(load):
    modules = (Pooling(), DENSE, Normalize())
    assert_same_vectors(load(Layout(modules=modules, style="old", weights="bin", transformer_folder="0_Transformer")))


@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_backbone_weights_in_pytorch_model_bin(family, load):
    assert_same_vectors(load(Layout(modules=FAMILIES[family].modules), family, weights="bin"))


@pytest.mark.parametrize("family", ["roberta", "mpnet", "llama", "gemma"])
def test_a_language_models_weights(family, load):
    assert_same_vectors(load(Layout(modules=FAMILIES[family].modules), family, wrapped=True))


@pytest.mark.parametrize("name", ["sentence_roberta_config.json", "sentence_distilbert_config.json"])
def test_older_names_of_the_transformer_settings(name, load):
    def rename(folder):
        (folder / "sentence_bert_config.json").rename(folder / name)

    engine, reference = load(Layout(style="old", max_seq_length=9), change=rename)
    assert engine.spec.max_length == 9
    assert_same_vectors((engine, reference))


@pytest.mark.parametrize("without", ["config_sentence_transformers.json", "sentence_bert_config.json"])
def test_files_that_the_first_versions_did_not_have(without, load):
    assert_same_vectors(load(Layout(style="old"), change=lambda folder: (folder / without).unlink()))


def test_a_pooling_file_without_the_newer_modes(load):
    """As in all-MiniLM-L6-v2: four booleans."""

    def shorten(folder):
        path = folder / "1_Pooling" / "config.json"
        content = json.loads(path.read_text())
        kept = [key for key in content if not key.endswith(("weightedmean_tokens", "lasttoken", "include_prompt"))]
        path.write_text(json.dumps({key: content[key] for key in kept}))

    assert_same_vectors(load(Layout(modules=(Pooling(modes=("mean", "max")),), style="old"), change=shorten))


@pytest.mark.parametrize("flags", [{}, {"pooling_mode_cls_token": True}, {"pooling_mode_mean_tokens": False}])
def test_a_pooling_file_that_leaves_booleans_out(flags, load):
    def rewrite(folder):
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, **flags}))

    assert_same_vectors(load(Layout(style="old"), change=rewrite))


PREFIXES = ("module.", "module.bert.", "0.auto_model.", "auto_model.", "model.", "roberta.", "encoder.", "a.b.c.")


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(("family", "prefixes"), [("bert", PREFIXES), ("llama", ("base_model.model.model.", "a."))])
def test_a_wrapper_s_prefix_of_the_tensors_names(family, prefixes, backend, tmp_path):
    """Both backends read them, and neither reads one tower of two."""
    folder = write_checkpoint(tmp_path / "model", family)
    plain = load_file(folder / "model.safetensors")
    with Engine(str(folder), backend=backend, dtype="float32", device="cpu") as engine:
        expected = engine.embed(TEXTS).embeddings
    for prefix in prefixes:
        save_file({prefix + name: tensor for name, tensor in plain.items()}, folder / "model.safetensors")
        with Engine(str(folder), backend=backend, dtype="float32", device="cpu") as engine:
            assert (engine.embed(TEXTS).embeddings == expected).all(), prefix
    towers = {f"{side}.{name}": tensor for name, tensor in plain.items() for side in ("query", "document")}
    save_file(towers, folder / "model.safetensors")
    with pytest.raises(WeightMismatchError, match="misses"):
        Engine(str(folder), backend=backend, dtype="float32", device="cpu")
