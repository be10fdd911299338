"""``millpond convert``: the pickles of a checkpoint as safetensors, equal, whole or not at all."""

from __future__ import annotations

import json
import pickle
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny import Dense, Layout, Pooling, write_checkpoint
from typer.testing import CliRunner

from millpond import Engine
from millpond.backends.torch.loading import convert as module
from millpond.backends.torch.loading.convert import convert
from millpond.checkpoints.checkpoint import read_checkpoint
from millpond.checkpoints.weights import stored_tensors
from millpond.cli.app import app
from millpond.errors import InvalidRequestError, MissingExtraError, ModelLoadError

pytestmark = [pytest.mark.contract, pytest.mark.torch]
TEXTS = ["The old mill", "a pond"]


def pickled(folder):
    """The checkpoint with each of its safetensors as a pickle."""
    for path in folder.glob("**/model.safetensors"):
        torch.save(load_file(path), path.with_name("pytorch_model.bin"))
        path.unlink()
    return folder


def vectors(folder):
    with Engine(folder, device="cpu", dtype="float32") as engine:
        return engine.embed(TEXTS).embeddings


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_converted_checkpoint_gives_the_same_vectors(tmp_path, elsewhere):
    layout = Layout(modules=(Pooling(), Dense(out_features=8)))
    folder = pickled(write_checkpoint(tmp_path / "model", sentence_transformers=layout))
    expected = vectors(folder)
    before = sorted(folder.rglob("*"))
    words = ["convert", str(folder), *(["--output", str(tmp_path / "new")] if elsewhere else [])]
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 0 and said.stdout.count("wrote ") == 2, said.output
    target = tmp_path / "new" if elsewhere else folder
    assert len(list(target.rglob("model.safetensors"))) == 2
    assert (sorted(folder.rglob("*")) == before) == elsewhere
    for path in target.rglob("*.bin"):
        path.unlink()
    assert (vectors(target) == expected).all()
    with pytest.raises(InvalidRequestError, match="needs no conversion"):
        convert(target)


def test_shards_types_and_shared_tensors(tmp_path):
    table = torch.randn(4, 3)
    first = {"a": table, "tied": table, "rows": table[1:3], "half": torch.ones(2, dtype=torch.float16)}
    second = {"b": torch.ones(3, 2).T, "c": torch.ones(2, dtype=torch.bfloat16), "d": torch.arange(3)}
    names = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    for name, tensors in zip(names, (first, second), strict=True):
        torch.save(tensors, tmp_path / name)
    shards = dict.fromkeys(first, names[0]) | dict.fromkeys(second, names[1])
    index = {"metadata": {"total_size": 1}, "weight_map": shards}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    written = convert(tmp_path)
    assert [file.path.name for file in written] == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    stored = stored_tensors(tmp_path)
    assert stored.keys() == shards.keys()
    for name, tensor in (first | second).items():
        assert stored[name].dtype == str(tensor.dtype).removeprefix("torch.")
        assert (stored[name].float32() == tensor.float().numpy()).all()


def test_bge_m3_s_layers_and_older_pickles(tmp_path):
    layers = {"weight": torch.randn(1, 4), "bias": torch.zeros(1)}
    torch.save(layers, tmp_path / "sparse_linear.pt")
    torch.save(layers, tmp_path / "colbert_linear.pt", _use_new_zipfile_serialization=False)
    assert {file.path.name for file in convert(tmp_path)} == {"sparse_linear.safetensors", "colbert_linear.safetensors"}
    assert torch.equal(load_file(tmp_path / "colbert_linear.safetensors")["weight"], layers["weight"])


def test_a_layer_that_was_converted_is_read_from_there(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "xlm-roberta")
    for name in ("sparse_linear", "colbert_linear"):
        (folder / f"{name}.pt").write_bytes(b"not read")
        save_file({"weight": torch.ones(1, 48), "bias": torch.zeros(1)}, folder / f"{name}.safetensors")
    layout = read_checkpoint(folder).layout
    assert layout.sparse is not None and layout.sparse.path.name == "sparse_linear.safetensors"


def test_a_run_that_fails_leaves_nothing(tmp_path, monkeypatch):
    folder = pickled(write_checkpoint(tmp_path / "model"))
    before = sorted(tmp_path.rglob("*"))

    def fail(tensors, path, metadata):
        save_file(dict(list(tensors.items())[:1]), path)
        raise OSError("no space left on device")

    monkeypatch.setattr(module, "save_file", fail)
    for output in (None, tmp_path / "new"):
        with pytest.raises(OSError, match="no space"):
            convert(folder, output)
        assert sorted(tmp_path.rglob("*")) == before


def test_what_a_killed_run_left_is_in_nobody_s_way(tmp_path):
    folder = pickled(write_checkpoint(tmp_path / "model"))
    (folder / ".model.safetensors.part").write_bytes(b"half")
    (tmp_path / ".new.part").mkdir()
    (tmp_path / ".new.part" / "half").write_bytes(b"half")
    vectors(folder)
    convert(folder, tmp_path / "new")
    assert not (tmp_path / ".new.part").exists() and not (tmp_path / "new" / "half").exists()
    convert(folder)
    assert not (folder / ".model.safetensors.part").exists()


def test_what_is_refused(tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "model")
    with pytest.raises(InvalidRequestError, match="needs no conversion"):
        convert(folder)
    pickled(folder)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(InvalidRequestError, match="exists and is not empty"):
        convert(folder, tmp_path / "full")
    torch.save({"epoch": 3, "a": torch.ones(1)}, folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="holds epoch, a int"):
        convert(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"a": print}))
    with pytest.raises(ModelLoadError, match="damaged"):
        convert(folder)
    said = CliRunner().invoke(app, ["convert", str(tmp_path / "none")])
    assert isinstance(said.exception, InvalidRequestError) and "is no folder" in str(said.exception)
    monkeypatch.setitem(sys.modules, "torch", None)
    said = CliRunner().invoke(app, ["convert", str(folder)])
    assert isinstance(said.exception, MissingExtraError) and 'pip install "millpond[torch]"' in str(said.exception)
