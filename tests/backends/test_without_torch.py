"""What needs torch says so in one sentence, with the way out, before weights or a tokenizer are read."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from tests.tiny import Dense, Layout, Pooling, edit_json, write_checkpoint
from tests.tiny.heads import write_m3, write_stanford

from millpond import LLM, Engine
from millpond.engine.loading import backend_of
from millpond.errors import MillpondError, MissingExtraError
from millpond.late_interaction import MemoryIndex
from millpond.native import library
from millpond.values.config import EngineConfig

pytestmark = pytest.mark.contract
INSTALL = 'pip install "millpond[torch]"'


@pytest.fixture
def remove_torch(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes torch and transformers missing; before, a test may write checkpoints."""

    def remove() -> None:
        for name in ("torch", "transformers"):
            monkeypatch.setitem(sys.modules, name, None)

    return remove


def changed(folder: Path, family: str = "bert", **fields: Any) -> Path:
    """A checkpoint with other fields in config.json; its weights and its tokenizer cannot be read."""
    write_checkpoint(folder, family)
    edit_json(folder / "config.json", **fields)
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).write_bytes(b"not read")
    return folder


def pickled(folder: Path, file: str, write: Callable[..., Path] = write_checkpoint, **options: Any) -> Path:
    """A checkpoint in which a pickle, which cannot be read, has the place of safetensors; shards have an index."""
    write(folder, **options)
    pickle = folder / file
    pickle.write_bytes(b"not read")
    stem = pickle.stem.removeprefix("pytorch_").partition("-")[0]
    safe = pickle.with_name(f"{stem}.safetensors")
    if stem != pickle.stem.removeprefix("pytorch_"):
        index = {"weight_map": dict.fromkeys(load_file(safe), pickle.name)}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    safe.unlink()
    return folder


DENSE = Layout(modules=(Pooling(), Dense(out_features=8)))
CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "a family without a plan": ({"family": "gpt2"}, "GPT2 has no native plan"),
    "a recurrent family": ({"family": "jamba"}, "Jamba has no native plan"),
    "a convolution": ({"family": "deberta-v2", "conv_kernel_size": 3}, "the convolution of DeBERTa v2 xlarge"),
    "an activation": ({"hidden_act": "quick_gelu"}, "activation quick_gelu"),
}
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "a GPU": ({"device": "cuda"}, "device='cuda'"),
    "GPUs": ({"device": ["cuda:0", "cuda:1"]}, "device='cuda:0,cuda:1'"),
    "float16": ({"dtype": "float16"}, "dtype='float16'"),
    "fp8": ({"quantization": "fp8"}, "quantization='fp8'"),
    "compiling": ({"compile": True}, "compile=True"),
    "the other backend": ({"backend": "torch"}, 'backend="torch"'),
}
PICKLED: dict[str, dict[str, Any]] = {
    "pytorch_model.bin": {},
    "pytorch_model-00001-of-00001.bin": {},
    "2_Dense/pytorch_model.bin": {"sentence_transformers": DENSE},
    "sparse_linear.pt": {"write": write_m3},
}


def said(make: Callable[[], object]) -> str:
    """The only sentence of a refusal that names the extra once."""
    with pytest.raises(MillpondError) as refused:
        make()
    text = str(refused.value)
    assert text.count(INSTALL) == 1 and "needs torch" in re.sub("needs the extra torch", "needs torch", text), text
    return text


@pytest.mark.parametrize("name", CHANGED)
def test_a_configuration(name, tmp_path, remove_torch):
    fields, reason = CHANGED[name]
    folder = changed(tmp_path / "model", **fields)
    remove_torch()
    assert said(lambda: Engine(folder)) == f"{folder} needs torch ({reason}): {INSTALL}"


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option(name, tmp_path, remove_torch):
    options, reason = OPTIONS[name]
    folder = changed(tmp_path / "model")
    remove_torch()
    assert reason in said(lambda: Engine(folder, **options))
    if "backend" not in options and "compile" not in options:
        assert reason in said(lambda: LLM(str(folder), **options))


@pytest.mark.parametrize("file", PICKLED)
def test_pickles(file, tmp_path, remove_torch):
    folder = pickled(tmp_path / "model", file, **PICKLED[file])
    remove_torch()
    with pytest.raises(MillpondError) as refused:
        Engine(folder)
    text = str(refused.value)
    assert text.startswith(f"{folder / file} is a pickle, which torch reads: {INSTALL}; or ")
    assert text.endswith(f"millpond convert {folder}")
    assert backend_of(EngineConfig(model=str(folder))) == f"none here: {text}"


def test_a_pickle_whose_tensors_say_what_it_is(tmp_path, remove_torch):
    folder = pickled(tmp_path / "model", "pytorch_model.bin", write_stanford)
    remove_torch()
    with pytest.raises(MillpondError, match="is a pickle, which torch reads"):
        Engine(folder)


def test_a_processor_without_kernels(tmp_path, remove_torch, monkeypatch):
    folder = changed(tmp_path / "model")
    remove_torch()
    monkeypatch.setattr(library, "_fill", lambda highest: "this processor has no AVX2")
    assert said(lambda: Engine(folder)) == (
        f"{folder} needs torch (no compiled kernels: this processor has no AVX2): {INSTALL}"
    )


def test_what_returns_or_takes_what_is_torch_s(checkpoint_of, engine_of, remove_torch):
    colbert, bert = engine_of(write_stanford), checkpoint_of("bert")
    remove_torch()
    assert "device='cuda' needs torch" in said(lambda: MemoryIndex(colbert, device="cuda"))
    with Engine(bert) as engine, pytest.raises(MissingExtraError, match="needs transformers"):
        _ = engine.tokenizer
    llm = LLM(str(bert))
    assert "LLM.encode() returns tensors" in said(lambda: llm.encode(["a"], pooling_task="embed"))
