"""Static embeddings give what sentence-transformers' StaticEmbedding and fastembed's reader of model2vec give."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny.static import WIDTH, write_model2vec, write_static
from tests.tiny.tokenizers import SENTENCES

from millpond import Engine, ModelLoadError

pytestmark = [pytest.mark.torch, pytest.mark.contract]

# An empty text, one of unknown tokens only, and one that is cut.
TEXTS = [*SENTENCES, "", "😀 😀", "the mill 😀 stands", "mill " * 700]
_Writer = Callable[[Path], Path]


def _embedded(folder: Path, backend: str, **options: Any) -> np.ndarray[Any, Any]:
    with Engine(folder, backend=backend, device="cpu", dtype="float32") as engine:
        return np.asarray(engine.embed(TEXTS, **options))


def _by_fastembed(folder: Path) -> np.ndarray[Any, Any]:
    from fastembed import TextEmbedding

    model = TextEmbedding("minishlab/potion-base-8M", specific_model_path=str(folder), local_files_only=True)
    return np.stack(list(model.embed(TEXTS)))


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": "int8"}, {"dtype": "float16"}, {"mapped": True, "weighted": True}, {"weighted": True}],
    ids=["float32", "int8", "float16", "mapped", "weighted"],
)
def test_model2vec(tmp_path: Path, backend: str, options: dict[str, Any]) -> None:
    folder = write_model2vec(tmp_path, **options)
    expected = _by_fastembed(folder)
    found = _embedded(folder, backend)
    assert np.abs(found - expected)[:-1].max() < (2e-3 if options.get("dtype") == "float16" else 1e-5)
    assert np.abs(found[18:20]).max() == 0
    wrong = _embedded(_as_sentence_transformers(folder), backend)  # unknown tokens are kept: the negative control
    assert np.abs(wrong - expected)[:-1].max() > 0.1


def test_model2vec_cuts_characters(tmp_path: Path) -> None:
    folder = write_model2vec(tmp_path, max_length=8)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    characters = 8 * int(np.median(list(map(len, vocabulary))))
    text = "water " * 7 + "pond"  # eight tokens, of more characters than the median
    with Engine(folder, device="cpu") as engine:
        assert len(engine.tokenize([text[:characters]], special_tokens=False)[0]) < 8
        whole, cut = np.asarray(engine.embed([text, text[:characters]]))
    assert np.abs(whole - cut).max() < 1e-6


def _as_sentence_transformers(folder: Path) -> Path:
    """The same table, with another owner."""
    (folder / "config.json").unlink()
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (path, name) in enumerate([("", "StaticEmbedding"), ("1_Normalize", "Normalize")])
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    return folder


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(
    "write",
    [write_static, lambda folder: write_static(folder, path="", truncation=16), lambda folder: _mapped(folder)],
    ids=["0_StaticEmbedding", "truncated", "model2vec's tensors"],
)
def test_sentence_transformers(tmp_path: Path, write: _Writer, backend: str) -> None:
    from sentence_transformers import SentenceTransformer

    folder = write(tmp_path)
    reference = SentenceTransformer(str(folder), device="cpu")
    expected = reference.encode(TEXTS, convert_to_numpy=True)
    assert np.abs(_embedded(folder, backend) - expected).max() < 1e-5
    prompted = reference.encode(TEXTS, prompt="find the ", convert_to_numpy=True)
    assert np.abs(_embedded(folder, backend, prompt="find the ") - prompted).max() < 1e-5
    assert np.abs(prompted - expected).max() > 0.1
    special = np.abs(_embedded(folder, backend, prompt="[CLS] ") - expected).max()
    assert special > 0.1  # special tokens kept: the negative control


def _mapped(folder: Path) -> Path:
    return _as_sentence_transformers(write_model2vec(folder, mapped=True, weighted=True))


def test_the_engine_knows_no_difference(tmp_path: Path) -> None:
    folder = write_static(tmp_path / "static-retrieval-mrl-tiny", path="")
    with Engine(folder, device="cpu", cache=tmp_path / "cache.db") as engine:
        assert engine.spec.tasks == {"embed", "token_embed"}
        assert engine.spec.dimensions == WIDTH
        whole = np.asarray(engine.embed(TEXTS, normalize=False))
        again = np.asarray(engine.embed(TEXTS, normalize=False))
        assert np.array_equal(whole, again)
        tokens = engine.token_embed([SENTENCES[0]], normalize=False)[0]
        assert np.abs(np.asarray(tokens).mean(axis=0) - whole[0]).max() < 1e-6
        assert np.asarray(engine.score([SENTENCES[0]], [SENTENCES[0]])).item() == pytest.approx(1, abs=1e-5)


def test_a_table_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = write_static(tmp_path / "a", path="")
    from safetensors.numpy import save_file

    save_file({"embedding.weight": np.zeros((5, 8), dtype=np.float32)}, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match="5 rows"):
        Engine(folder)
    save_file({"other": np.zeros((5, 8), dtype=np.float32)}, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"embedding\.weight"):
        Engine(folder)
    folder = write_model2vec(tmp_path / "b", max_length="long")
    with pytest.raises(ModelLoadError, match="max_length"):
        Engine(folder)
