"""GGUF files compared with folders of the same, dequantized weights, and with llama.cpp where that is installed."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny import TEXTS
from tests.tiny.gguf_file import write_gguf

from millpond import Engine
from millpond.checkpoints.gguf import tensors
from millpond.checkpoints.weights import stored_tensors
from millpond.errors import MissingExtraError, ModelLoadError

TOLERANCE = 1e-5
NEEDS_GGUF = pytest.mark.skipif(find_spec("gguf") is None, reason="the library gguf is not installed")
FAMILIES: dict[str, Any] = {"bert": "cls", "nomic": "mean", "qwen3": "lasttoken", "gemma3": "mean"}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "millpond" / "gguf"


def opened(path: Path, **options: Any) -> Engine:
    return Engine(path, dtype="float32", device="cpu", **options)


CELLS = [
    *((family, kind, "native") for family in FAMILIES for kind in ("F16", "Q8_0", "Q4_K")),
    *((family, "Q8_0", "torch") for family in FAMILIES),
    *(("bert", kind, "native") for kind in ("F32", "BF16", "Q6_K")),
    ("bert", "Q4_K", "torch"),
]


@NEEDS_GGUF
@pytest.mark.parametrize(("family", "kind", "backend"), CELLS)
def test_equal_to_the_dequantized_weights(family, kind, backend, tmp_path, record_property):
    path = write_gguf(tmp_path / "model.gguf", family, kind=kind, pooling=FAMILIES[family])
    with opened(path, backend=backend) as file, opened(tmp_path / "source") as source:
        assert file.tokenize(TEXTS) == source.tokenize(TEXTS)
        assert file.spec.pooling == source.spec.pooling == (FAMILIES[family],)
        assert file.spec.max_length == source.spec.max_length
        worst = float(np.abs(file.embed(TEXTS).embeddings - source.embed(TEXTS).embeddings).max())
    record_property("error", worst)
    assert worst <= TOLERANCE


@NEEDS_GGUF
@pytest.mark.parametrize(
    ("family", "change"),
    [("bert", "pooling"), ("nomic", "gates"), ("gemma3", "norms"), ("qwen3", "rotation"), ("bert", "case")],
)
def test_notices(family, change, tmp_path, monkeypatch):
    """The mistakes that a reader may make: another pooling, up for gate, norms as they are stored, another base."""
    keys = {"pooling": {"bert.pooling_type": 1}, "rotation": {"qwen3.rope.freq_base": 1e4}}.get(change, {})
    path = write_gguf(tmp_path / "model.gguf", family, pooling=FAMILIES[family], lowercase=change == "case", **keys)
    if change in ("gates", "norms"):
        from dataclasses import replace

        from millpond.checkpoints.gguf import file

        row = file.ROWS["nomic-bert" if change == "gates" else "gemma-embedding"]
        parts = {**row.parts, "ffn_up": row.parts["ffn_gate"], "ffn_gate": row.parts["ffn_up"]}
        wrong = replace(row, parts=parts) if change == "gates" else replace(row, centred=False)
        monkeypatch.setattr(file, "ROWS", {"nomic-bert": wrong, "gemma-embedding": wrong})
    texts = ["THE WHEEL turns.", *TEXTS]
    with opened(path) as read, opened(tmp_path / "source") as source:
        if change == "case":  # a vocabulary without capitals is one of folded texts
            assert read.tokenize(texts) == source.tokenize(texts)
            return
        assert np.abs(read.embed(texts).embeddings - source.embed(texts).embeddings).max() > 1e-3


@NEEDS_GGUF
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_llama_cpp(family, tmp_path, record_property):
    """The same tokens, and vectors up to its approximations in half precision."""
    from llama_cpp import Llama

    path = write_gguf(tmp_path / "model.gguf", family, kind="F16", pooling=FAMILIES[family], lowercase=True)
    texts, model = ["the wheel turns", "how deep is it?"], Llama(str(path), embedding=True, verbose=False, n_ctx=64)
    with opened(path) as file:
        for text, ids, vector in zip(texts, file.tokenize(texts), file.embed(texts).embeddings, strict=True):
            assert model.tokenize(text.encode(), add_bos=True, special=True) == ids
            assert float(np.dot(model.embed(text, normalize=True), vector)) > 0.99999


@NEEDS_GGUF
def test_the_weights_stay_in_the_file(tmp_path, cache):
    path = write_gguf(tmp_path / "model.gguf", kind="Q8_0")
    with opened(path) as first:
        assert first.spec.name == str(path)
        fingerprint = first.spec.fingerprint
    (folder,) = cache.iterdir()
    assert sum(each.stat().st_size for each in folder.rglob("*") if not each.is_symlink()) < 100_000
    held = stored_tensors(folder)["embeddings.word_embeddings.weight"]
    whole = held.float32()
    assert held.shape == whole.shape
    assert (held[[3, 1]].float32() == whole[[3, 1]]).all()
    assert (held[2:5].float32() == whole[2:5]).all()
    assert held.bfloat16().dtype == np.uint16
    with opened(path) as again:
        assert again.spec.fingerprint == fingerprint
    assert [*cache.iterdir()] == [folder]
    os.utime(path, ns=(1, 1))  # written anew
    with opened(path):
        assert len([*cache.iterdir()]) == 2


@NEEDS_GGUF
@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("bert", {"general.architecture": "llama"}, r"is a GGUF of llama, .* it reads bert, nomic-bert, qwen3, gemma-"),
        ("bert", {"bert.pooling_type": 4}, r"bert.pooling_type 4; millpond reads embedders, with mean \(1\)"),
        ("bert", {"bert.pooling_type": None}, r"bert.pooling_type None"),
        ("bert", {"bert.attention.causal": True}, r"is a causal bert"),
        ("gemma3", {"gemma-embedding.attention.causal": True}, r"is a causal gemma-embedding"),
        ("qwen3", {"tokenizer.ggml.merges": None}, r"no tokenizer.ggml.merges, by which words are split; convert"),
        ("bert", {"split.count": 3}, r"is one of 3 parts of a model; join them"),
        ("bert", {"tokenizer.ggml.model": "t5"}, r"has a tokenizer 't5', and millpond reads bert with 'bert' only"),
        ("qwen3", {"tokenizer.ggml.pre": "llama-bpe"}, r"splits words by 'llama-bpe'"),
        ("qwen3", {"qwen3.rope.scaling.type": "yarn"}, r"scales its rotary positions \(qwen3.rope.scaling.type\)"),
        ("bert", {"bert.block_count": None}, r"has no bert.block_count, which config.json's num_hidden_layers is made"),
    ],
)
def test_other_files_are_refused(family, keys, message, tmp_path):
    path = write_gguf(tmp_path / "model.gguf", family, kind="F16", **keys)
    with pytest.raises(ModelLoadError, match=message):
        opened(path)


@NEEDS_GGUF
@pytest.mark.parametrize(
    ("keys", "overrides"),
    [
        ({"qwen3.attention.causal": False}, {"is_causal": False}),
        ({"qwen3.rope.freq_base": None}, {"rope_theta": 10_000.0, "rope_parameters": None}),
        ({"qwen3.attention.key_length": None}, {}),
    ],
)
def test_keys_that_say_what_llama_cpp_computes(keys, overrides, tmp_path):
    """Also by their absence."""
    path = write_gguf(tmp_path / "model.gguf", "qwen3", kind="F16", pooling="lasttoken", **keys)
    with opened(path) as file, opened(tmp_path / "source", hf_overrides=overrides) as source:
        assert np.abs(file.embed(TEXTS).embeddings - source.embed(TEXTS).embeddings).max() <= TOLERANCE
    if overrides:
        with opened(path) as file, opened(tmp_path / "source") as source:
            assert np.abs(file.embed(TEXTS).embeddings - source.embed(TEXTS).embeddings).max() > 1e-2


@NEEDS_GGUF
def test_a_damaged_file_is_refused(tmp_path, cache):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(ModelLoadError, match=r"model.gguf is no GGUF file that can be read: .*; fetch it again"):
        opened(path)
    path = write_gguf(tmp_path / "cut" / "model.gguf")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelLoadError, match="no GGUF file that can be read"):
        opened(path)
    assert [*cache.iterdir()] == []


def test_without_the_library(tmp_path, monkeypatch):
    monkeypatch.setattr(tensors, "find_spec", lambda name: None)
    path = tmp_path / "model.gguf"
    path.touch()
    with pytest.raises(MissingExtraError, match=r'pip install "millpond\[gguf\]"'):
        opened(path)
