"""Weights out of ONNX files, as three programs export them: those of the checkpoint, number for number."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.tiny import TEXTS
from tests.tiny.tokenizers import write_tokenizer

from millpond import Engine
from millpond.checkpoints import onnx_file
from millpond.checkpoints.resolve import resolve
from millpond.checkpoints.weights import stored_tensors, tensor_shapes
from millpond.errors import ModelLoadError, WeightMismatchError

EXPORTED = Path(__file__).parent / "exported"
PROGRAMS = ("torch", "dynamo", "onnxruntime")
CONFIG = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 360,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}


def written(folder: Path, file: str, name: str = "model.onnx") -> Path:
    """A checkpoint with this file of weights."""
    place = folder / name
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(EXPORTED / file, place)
    assert write_tokenizer(folder, "bert", limit=None, lowercase=True) <= 360
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return folder


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_tensor_is_that_of_the_checkpoint(program: str, tmp_path: Path) -> None:
    expected = load_file(EXPORTED / "model.safetensors")
    folder = written(tmp_path / "model", f"{program}.onnx")
    found = stored_tensors(folder)
    assert expected.keys() <= found.keys()
    assert tensor_shapes(folder).items() >= {name: tensor.shape for name, tensor in expected.items()}.items()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(found[name].float32(), tensor, err_msg=name)
    # The negative control: a square matrix that is not transposed has the right shape and other numbers.
    query = expected["encoder.layer.0.attention.self.query.weight"]
    assert np.abs(query - query.T).max() > 0.1


@pytest.mark.parametrize("backend", ["native", pytest.param("torch", marks=pytest.mark.torch)], ids=["native", "torch"])
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("name", ["model.onnx", "onnx/model.onnx", "model_optimized.onnx"])
def test_an_export_alone_gives_the_checkpoint_s_vectors(name: str, program: str, backend: Any, tmp_path: Path) -> None:
    whole = written(tmp_path / "whole", "model.safetensors", "model.safetensors")
    for dtype in ("float32", "bfloat16"):
        options: dict[str, Any] = {"backend": backend, "dtype": dtype}
        exported = written(tmp_path / dtype, f"{program}.onnx", name)
        with Engine(whole, **options) as left, Engine(exported, **options) as right:
            np.testing.assert_array_equal(left.embed(TEXTS).embeddings, right.embed(TEXTS).embeddings)
            assert left.spec.fingerprint != right.spec.fingerprint


def test_a_weight_of_another_layer_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: onnxruntime's joint attention, taken apart in another order."""
    whole = written(tmp_path / "whole", "model.safetensors", "model.safetensors")
    swapped = {end: names[::-1] for end, names in onnx_file._ATTENTION.items()}
    monkeypatch.setattr(onnx_file, "_ATTENTION", swapped)
    with Engine(whole) as left, Engine(written(tmp_path / "model", "onnxruntime.onnx")) as right:
        assert np.abs(left.embed(TEXTS).embeddings - right.embed(TEXTS).embeddings).max() > 0.01


def test_other_weights_have_precedence(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", "model.safetensors", "model.safetensors")
    (folder / "model.onnx").write_bytes(b"not read")
    with Engine(folder) as engine:
        assert len(engine.embed(TEXTS)) == len(TEXTS)


def test_a_quantized_graph_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"quantized for onnxruntime \(\w+\).*exported from"):
        Engine(written(tmp_path / "model", "int8.onnx"))


def test_a_quantized_graph_under_its_usual_name_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"weights as ONNX only \(onnx/model_quantized.onnx\)"):
        Engine(written(tmp_path / "model", "int8.onnx", "onnx/model_quantized.onnx"))


@pytest.mark.parametrize("size", [0, 1, 100, 20_000])
def test_a_file_that_ends_early_is_damaged(size: int, tmp_path: Path) -> None:
    folder = written(tmp_path / "model", "torch.onnx")
    content = (folder / "model.onnx").read_bytes()
    (folder / "model.onnx").write_bytes(content[:size])
    with pytest.raises((ModelLoadError, WeightMismatchError), match=r"the weight file is damaged.*fetch it again"):
        Engine(folder)


def test_numbers_in_a_file_beside(tmp_path: Path) -> None:
    """A large export keeps them in ``model.onnx_data``; a path out of the folder is refused."""
    folder = tmp_path / "model"
    folder.mkdir()
    numbers = np.arange(6, dtype=np.float32)
    (folder / "model.onnx_data").write_bytes(b"12345678" + numbers.tobytes())

    def field(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2, len(content)]) + content

    def graph(location: str) -> bytes:
        entries = {"location": location, "offset": "8", "length": "24"}
        beside = b"".join(field(13, field(1, key.encode()) + field(2, text.encode())) for key, text in entries.items())
        tensor = bytes([1 << 3, 2, 1 << 3, 3, 2 << 3, 1]) + field(8, b"layer.weight") + beside
        return field(7, field(5, tensor))

    (folder / "model.onnx").write_bytes(graph("model.onnx_data"))
    np.testing.assert_array_equal(stored_tensors(folder)["layer.weight"].float32(), numbers.reshape(2, 3))
    (folder / "model.onnx").write_bytes(graph("../model.onnx_data"))
    with pytest.raises(ModelLoadError, match="which is not beside it"):
        stored_tensors(folder)


@pytest.mark.parametrize(
    ("name", "pooling", "normalize"),
    [
        ("Qdrant/all-MiniLM-L6-v2-onnx", ("mean",), True),
        ("Qdrant/paraphrase-multilingual-MiniLM-L12-v2-onnx-Q", ("mean",), False),
        ("Qdrant/bge-small-en-v1.5-onnx-Q", ("cls",), True),
    ],
)
def test_the_repositories_of_fastembed_are_pooled_as_it_pools_them(
    name: str, pooling: tuple[str, ...], normalize: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40, encoding="utf-8")
    written(repository / "snapshots" / ("0" * 40), "torch.onnx", "model_optimized.onnx")
    assert resolve(name).revision == "0" * 40
    with Engine(name) as engine:
        assert (engine.spec.pooling, engine.spec.normalize) == (pooling, normalize)
        assert len(engine.embed(TEXTS)) == len(TEXTS)
