"""Names as sentence-transformers reads them, and folders and files that are no checkpoint that is read here."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from tests.tiny import TEXTS, Layout, Normalize, Pooling, write_checkpoint
from tests.tiny.heads import write_cross_encoder

from millpond import Engine
from millpond.checkpoints.resolve import hub_ids, resolve
from millpond.engine.loading import backend_of, describe
from millpond.engine.shared import get_engine
from millpond.errors import ModelLoadError
from millpond.values.config import EngineConfig


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """``hub("owner/name", write)`` writes a repository into an offline cache of the hub."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)

    def add(name: str, write: Callable[[Path], object]) -> Path:
        repository = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text("0" * 40, encoding="utf-8")
        snapshot = repository / "snapshots" / ("0" * 40)
        write(snapshot)
        return snapshot

    return add


def bert(folder: Path) -> Path:
    return write_checkpoint(folder, "bert")


# --- Names ----------------------------------------------------------------------------------------------------------


def test_a_name_without_an_owner_is_that_of_sentence_transformers(hub: Callable[..., Path]) -> None:
    hub("sentence-transformers/all-MiniLM-L6-v2", bert)
    hub("cross-encoder/ms-marco-MiniLM-L6-v2", write_cross_encoder)
    hub("cross-encoder/ettin-reranker-17m-v1", write_cross_encoder)
    hub("bert-base-uncased", bert)
    with Engine("all-MiniLM-L6-v2") as short, Engine("sentence-transformers/all-MiniLM-L6-v2") as full:
        assert short.spec.name == full.spec.name == "sentence-transformers/all-MiniLM-L6-v2"
        assert short.spec.fingerprint == full.spec.fingerprint
    assert resolve("ms-marco-MiniLM-L6-v2").name == "cross-encoder/ms-marco-MiniLM-L6-v2"
    assert resolve("ettin-reranker-17m-v1").name == "cross-encoder/ettin-reranker-17m-v1"  # the second owner
    assert resolve("bert-base-uncased").name == "bert-base-uncased"


def test_a_folder_of_the_name_has_precedence(hub: Callable[..., Path], tmp_path: Path) -> None:
    hub("sentence-transformers/all-MiniLM-L6-v2", bert)
    bert(tmp_path / "all-MiniLM-L6-v2")
    assert resolve("all-MiniLM-L6-v2").folder == Path("all-MiniLM-L6-v2")


def test_both_spellings_share_one_engine(hub: Callable[..., Path]) -> None:
    hub("sentence-transformers/all-MiniLM-L6-v2", bert)
    with get_engine("all-MiniLM-L6-v2") as engine:
        assert get_engine("sentence-transformers/all-MiniLM-L6-v2") is engine


def test_a_name_that_is_not_found_is_named_with_all_that_was_tried(hub: Callable[..., Path]) -> None:
    with pytest.raises(ModelLoadError) as raised:
        resolve("all-MiniLM-L6-v9")
    for tried in ("all-MiniLM-L6-v9,", "sentence-transformers/all-MiniLM-L6-v9", "cross-encoder/all-MiniLM-L6-v9"):
        assert tried in str(raised.value)


def test_names_of_both_owners() -> None:
    assert hub_ids("stsb-roberta-base")[0] == "sentence-transformers/stsb-roberta-base"
    assert hub_ids("stsb-roberta-base", scoring=True)[0] == "cross-encoder/stsb-roberta-base"
    assert hub_ids("BERT-base-uncased") == ("BERT-base-uncased",)
    assert hub_ids("BAAI/bge-m3", scoring=True) == ("BAAI/bge-m3",)


@pytest.mark.torch
def test_the_names_without_an_owner_are_those_of_sentence_transformers() -> None:
    misc = pytest.importorskip("sentence_transformers.util.misc")
    assert [name for name in misc.ORIGINAL_TRANSFORMER_MODELS if hub_ids(name) != (name,)] == []


# --- What is no checkpoint ------------------------------------------------------------------------------------------


def without_weights(folder: Path) -> Path:
    bert(folder)
    (folder / "model.safetensors").unlink()
    return folder


def only(*names: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(b"content")
        return folder

    return write


def beside_config(*names: str) -> Callable[[Path], Path]:
    return lambda folder: only(*names)(without_weights(folder))


def adapter(folder: Path) -> Path:
    only("adapter_model.safetensors")(folder)
    base = {"base_model_name_or_path": "intfloat/e5-base", "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(base), encoding="utf-8")
    return folder


def tokenizer(folder: Path) -> Path:
    without_weights(folder)
    (folder / "config.json").unlink()
    return folder


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 90868376\n"


def pointer(folder: Path, name: str = "model.safetensors") -> Path:
    bert(folder)
    if name.endswith(".onnx"):
        (folder / "model.safetensors").unlink()
    (folder / name).write_text(POINTER, encoding="utf-8")
    return folder


def shards(folder: Path) -> Path:
    without_weights(folder)
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    shutil.copyfile(folder / "tokenizer.json", folder / "model-00001-of-00002.safetensors")
    return folder


def modules_unlisted(folder: Path) -> Path:
    layout = Layout(modules=(Pooling(), Normalize()), transformer_folder="0_Transformer")
    write_checkpoint(folder, "bert", sentence_transformers=layout)
    (folder / "modules.json").unlink()
    return folder


def several(folder: Path) -> Path:
    bert(folder / "checkpoint-500")
    bert(folder / "checkpoint-1000")
    return folder


def empty(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


KINDS: list[tuple[str, Callable[[Path], Path], tuple[str, ...]]] = [
    ("gguf", only("model-Q4_K_M.gguf"), ("GGUF", "model-Q4_K_M.gguf", "name the file itself")),
    ("gguf beside config.json", beside_config("model.gguf"), ("GGUF", "model.gguf", "name the file itself")),
    ("onnx", only("onnx/model.onnx", "tokenizer.json"), ("config.json is missing beside the weights",)),
    ("quantized onnx", beside_config("onnx/model_int8.onnx"), ("ONNX", "model_int8.onnx", "exported from")),
    ("openvino", beside_config("openvino/openvino_model.xml"), ("OpenVINO", "exported from")),
    ("tensorflow", beside_config("tf_model.h5"), ("TensorFlow", "tf_model.h5", "from_tf=True")),
    ("flax", beside_config("flax_model.msgpack"), ("Flax", "convert")),
    ("pickle", beside_config("model.pt"), ("pickle", "model.pt", "convert")),
    ("other safetensors", beside_config("weights.safetensors"), ("weights.safetensors", "rename")),
    ("adapter", adapter, ("adapter of PEFT", "base model, intfloat/e5-base", "not at hand")),
    ("tokenizer", tokenizer, ("tokenizer.json", "complete")),
    ("config", without_weights, ("neither model.safetensors nor pytorch_model.bin", "complete")),
    ("weights without config.json", only("model.safetensors"), ("config.json is missing beside the weights",)),
    ("modules without their list", modules_unlisted, ("0_Transformer, 1_Pooling", "modules.json", "fetch it again")),
    ("several models", several, ("several models (checkpoint-1000, checkpoint-500)", "name the folder")),
    ("nothing", empty, ("no files", "check the path")),
    ("git-lfs", pointer, ("git-lfs", "git lfs pull")),
    ("a missing shard", shards, ("model-00002-of-00002.safetensors", "complete")),
]


@pytest.mark.parametrize(("write", "parts"), [pytest.param(*row[1:], id=row[0]) for row in KINDS])
def test_a_folder_without_weights_says_what_it_has_and_the_way_out(
    write: Callable[[Path], Path], parts: tuple[str, ...], tmp_path: Path
) -> None:
    folder = write(tmp_path / "model")
    with pytest.raises(ModelLoadError) as raised:
        Engine(folder)
    assert str(folder) in str(raised.value)
    assert [part for part in parts if part not in str(raised.value)] == []
    assert "OSError" not in str(raised.value)


@pytest.mark.parametrize("name", ["model.safetensors", "model.onnx", "tokenizer.json", "config.json"])
def test_a_file_that_git_lfs_has_not_fetched(name: str, tmp_path: Path) -> None:
    """Also where a model is only described, which reads no weights."""
    folder = pointer(tmp_path / "model", name)
    said = rf"{folder / name} is a pointer of git-lfs, not the file; run .git lfs install. and .git lfs pull."
    with pytest.raises(ModelLoadError, match=said):
        Engine(folder)
    assert re.search(said, said_of(folder))


def said_of(folder: Path) -> str:
    """What `millpond models` says of a folder's backend, or why it describes nothing."""
    config = EngineConfig(model=str(folder))
    try:
        describe(config)
    except ModelLoadError as error:
        return str(error)
    return backend_of(config)


def test_a_gguf_file_that_git_lfs_has_not_fetched(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text(POINTER, encoding="utf-8")
    with pytest.raises(ModelLoadError, match="model.gguf is a pointer of git-lfs"):
        Engine(tmp_path / "model.gguf")


def test_a_gliner_without_its_encoder_says_whose_it_is(hub: Callable[..., Path], tmp_path: Path) -> None:
    folder = only("pytorch_model.bin")(tmp_path / "model")
    (folder / "gliner_config.json").write_text(json.dumps({"model_name": "someone/encoder"}), encoding="utf-8")
    with pytest.raises(ModelLoadError, match=rf"{folder} is a GLiNER, and its encoder, someone/encoder, .*model_name"):
        Engine(folder)


def test_a_hub_id_without_weights_says_so_too(hub: Callable[..., Path]) -> None:
    hub("someone/model-OV", beside_config("openvino_model.bin", "openvino_model.xml"))
    with pytest.raises(ModelLoadError, match=r"someone/model-OV has weights as OpenVINO only \(openvino_model"):
        Engine("someone/model-OV")


def test_a_folder_with_one_model_in_a_subfolder_is_that_model(tmp_path: Path) -> None:
    folder = bert(tmp_path / "outer" / "0_Transformer")
    (tmp_path / "outer" / "README.md").write_text("a card", encoding="utf-8")
    (tmp_path / "outer" / "notes").mkdir()
    with Engine(folder) as inner, Engine(tmp_path / "outer") as outer:
        assert outer.spec.name == str(tmp_path / "outer")
        assert (outer.embed(TEXTS).embeddings == inner.embed(TEXTS).embeddings).all()


def test_the_folder_of_a_repository_in_the_hub_s_cache_is_its_only_snapshot(tmp_path: Path) -> None:
    cached = tmp_path / "models--someone--model"
    folder = bert(cached / "snapshots" / "3f1c")
    only("refs/main")(cached)
    with Engine(folder) as inner, Engine(cached) as outer:
        assert (outer.embed(TEXTS).embeddings == inner.embed(TEXTS).embeddings).all()
    bert(cached / "snapshots" / "9a0b")
    with pytest.raises(ModelLoadError, match=r"several models \(snapshots/3f1c, snapshots/9a0b\); name the folder"):
        Engine(cached)


@pytest.mark.parametrize("backend", ["native", pytest.param("torch", marks=pytest.mark.torch)])
@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_shards_without_their_list_are_read_if_all_are_there(family: str, backend: Any, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", family)
    with Engine(folder, backend=backend, dtype="float32") as engine:
        expected = engine.embed(TEXTS).embeddings
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for part in range(3):
        names = sorted(tensors)[part::3]
        save_file({name: tensors[name] for name in names}, folder / f"model-0000{part + 1}-of-00003.safetensors")
    with Engine(folder, backend=backend, dtype="float32") as engine:
        assert (engine.embed(TEXTS).embeddings == expected).all()
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="model-00001-of-00003.safetensors, and not all of the 3 files"):
        Engine(folder, backend=backend)


def test_a_pooling_folder_of_its_own_is_no_backbone(tmp_path: Path) -> None:
    """The weights of the backbone are in the folder that modules.json names."""
    layout = Layout(modules=(Pooling(), Normalize()), transformer_folder="0_Transformer")
    folder = write_checkpoint(tmp_path / "model", "bert", sentence_transformers=layout)
    with Engine(folder) as engine:
        assert engine.embed(TEXTS).embeddings.shape[0] == len(TEXTS)
    (folder / "0_Transformer" / "model.safetensors").rename(folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match="neither"):
        Engine(folder)


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("model.onnx", "pass the folder that holds it"),
        ("model.safetensors", "pass the folder that holds it"),
        ("notes.txt", "pass the folder that holds config.json"),
    ],
)
def test_a_file_in_place_of_a_folder(name: str, way_out: str, tmp_path: Path) -> None:
    folder = bert(tmp_path / "model")
    (folder / name).touch()
    with pytest.raises(ModelLoadError, match=way_out):
        Engine(folder / name)
