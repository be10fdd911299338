"""A line that built HuggingFaceEmbeddings or HuggingFaceCrossEncoder builds our adapter, and means the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from langchain_core.documents import Document
from pydantic import ValidationError
from sentence_transformers import CrossEncoder, SentenceTransformer
from tests.tiny import Layout, Normalize, Pooling, write_checkpoint

from langchain_millpond import MillpondCrossEncoder, MillpondEmbeddings, MillpondReranker
from millpond import Engine

pytestmark = pytest.mark.torch

PROMPTS = {"query": "ask: ", "document": "read: ", "topic": "sort: "}

FLOAT32 = {"model_kwargs": {"torch_dtype": torch.float32}}

# What a user may have written; each builds the replaced class, too.
KWARGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "device": {"model_kwargs": {"device": "cpu"}},
    "normalized": {"encode_kwargs": {"normalize_embeddings": True}},
    "not normalized": {"encode_kwargs": {"normalize_embeddings": False, "batch_size": 2}},
    "cut": {"model_kwargs": {"truncate_dim": 16}, "encode_kwargs": {"normalize_embeddings": True}},
    "cut in encode": {"encode_kwargs": {"truncate_dim": 16, "normalize_embeddings": True}},
    "short": {"model_kwargs": {"tokenizer_kwargs": {"model_max_length": 12}}},
    "read from the end": {"model_kwargs": {"processor_kwargs": {"truncation_side": "left", "model_max_length": 12}}},
    "one prompt for both": {"encode_kwargs": {"prompt": "hm: "}},
    "one name for both": {"encode_kwargs": {"prompt_name": "topic"}},
    "a name each": {"encode_kwargs": {"prompt_name": "document"}, "query_encode_kwargs": {"prompt_name": "query"}},
    "queries only": {"query_encode_kwargs": {"prompt_name": "query"}},
    "replaced for queries": {"encode_kwargs": {"prompt": "hm: "}, "query_encode_kwargs": {"batch_size": 1}},
    "a default": {"model_kwargs": {"default_prompt_name": "topic"}},
    "own prompts": {"model_kwargs": {"prompts": {"x": "y: "}}, "query_encode_kwargs": {"prompt_name": "x"}},
    "hints": {
        "model_kwargs": {"trust_remote_code": True, "backend": "torch", "local_files_only": True, "revision": "main"},
        "encode_kwargs": {"convert_to_tensor": True, "precision": "float32", "device": "cpu"},
        "cache_folder": "/nowhere",
    },
}
# Without a prompt of their own, these get the checkpoint's here, which is told: see test_existing_index.py.
TOLD = frozenset(
    ("nothing", "device", "normalized", "not normalized", "cut", "cut in encode", "short", "read from the end", "hints")
)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Raw vectors, prompts for both roles, and a Matryoshka width."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    layout = Layout(modules=(Pooling(),), prompts=PROMPTS)
    return str(write_checkpoint(folder, sentence_transformers=layout, config={"is_matryoshka": True}))


@pytest.fixture(scope="session")
def unit_vectors(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Vectors of length one, a prompt that applies by default, and a Matryoshka width."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    layout = Layout(modules=(Pooling(), Normalize()), prompts=PROMPTS, default_prompt_name="topic")
    return str(write_checkpoint(folder, sentence_transformers=layout, config={"is_matryoshka": True}))


class Encoded:
    """What HuggingFaceEmbeddings computes, by sentence-transformers alone: its source, without the newlines."""

    def __init__(self, model: str, **kwargs: Any) -> None:
        self.client = SentenceTransformer(
            model, cache_folder=kwargs.get("cache_folder"), **kwargs.get("model_kwargs", {})
        )
        self.documents = {"show_progress_bar": False} | kwargs.get("encode_kwargs", {})
        queries = kwargs.get("query_encode_kwargs", {})
        self.queries = {"show_progress_bar": False} | queries if queries else self.documents

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = self.client.encode(texts, **self.documents).tolist()
        return vectors

    def embed_query(self, text: str) -> list[float]:
        vector: list[float] = self.client.encode([text], **self.queries).tolist()[0]
        return vector


def check_same(ours: MillpondEmbeddings, theirs: Any, texts: list[str]) -> None:
    np.testing.assert_allclose(ours.embed_documents(texts), theirs.embed_documents(texts), atol=2e-5)
    for text in texts[:2]:
        np.testing.assert_allclose(ours.embed_query(text), theirs.embed_query(text), atol=2e-5)


# A prompt is never cut off here, so texts with one differ if sentence-transformers cuts their beginning.
BOTH = [(fixture, name) for fixture in ("checkpoint", "unit_vectors") for name in KWARGS]
BOTH.remove(("unit_vectors", "read from the end"))


@pytest.mark.parametrize(("fixture", "name"), BOTH)
def test_the_same_options_give_the_same_vectors(
    request: pytest.FixtureRequest, texts: list[str], fixture: str, name: str
) -> None:
    model, kwargs = request.getfixturevalue(fixture), KWARGS[name]
    default = PROMPTS["topic"] if fixture == "unit_vectors" else ""
    keep = {"query_prompt": default, "document_prompt": default} if name in TOLD else {}
    ours = MillpondEmbeddings(model_name=model, dtype="float32", **kwargs, **keep)
    check_same(ours, Encoded(model, **kwargs), [*texts[:4], " ".join(texts)])


@pytest.mark.parametrize("name", ["nothing", "normalized", "device", "hints"])
def test_the_real_minilm_has_the_same_vectors(minilm: str, texts: list[str], name: str) -> None:
    ours = MillpondEmbeddings(model_name=minilm, dtype="float32", **KWARGS[name])
    check_same(ours, Encoded(minilm, **KWARGS[name]), texts[:5])


def test_the_options_of_the_bge_class_give_the_same_vectors(checkpoint: str, texts: list[str]) -> None:
    instruction, passage = "Represent this question for searching relevant passages: ", "passage: "
    options: dict[str, Any] = {
        "model_name": checkpoint,
        "model_kwargs": {"device": "cpu", "torch_dtype": torch.float32, "attn_implementation": "eager"},
        "encode_kwargs": {"normalize_embeddings": True},
    }
    client = SentenceTransformer(checkpoint)
    for asked, told in ((instruction, ""), (instruction, passage), ("", passage)):
        ours = MillpondEmbeddings(**options, query_instruction=asked, embed_instruction=told)
        documents = client.encode([told + text for text in texts], normalize_embeddings=True)
        np.testing.assert_allclose(ours.embed_documents(texts), documents, atol=2e-5)
        query = client.encode(asked + texts[0], normalize_embeddings=True)
        np.testing.assert_allclose(ours.embed_query(texts[0]), query, atol=2e-5)
    # Without embed_instruction, the class put nothing before a document.
    ours = MillpondEmbeddings(**options, query_instruction=instruction)
    np.testing.assert_allclose(ours.embed_documents(texts), client.encode(texts, normalize_embeddings=True), atol=2e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model_kwargs": {"device": "cpu", "max_length": 24}},
        {"model_kwargs": {"automodel_args": {"torch_dtype": "float32"}, "trust_remote_code": True}},
        {"model_kwargs": {"activation_fn": torch.nn.Sigmoid()}},
        {"model_kwargs": {"activation_fn": torch.nn.Identity(), "num_labels": 1}},
    ],
    ids=["nothing", "device", "dtype", "sigmoid", "identity"],
)
def test_a_cross_encoder_has_the_same_scores(cross_encoder: str, texts: list[str], options: dict[str, Any]) -> None:
    pairs = [(texts[0], text) for text in texts] + [("", "")]
    expected = CrossEncoder(cross_encoder, **options.get("model_kwargs", {})).predict(pairs)
    ours = MillpondCrossEncoder(model_name=cross_encoder, dtype="float32", **options).score(pairs)
    np.testing.assert_allclose(ours, expected, atol=2e-5, rtol=1e-5)
    reranker = MillpondReranker(model_name=cross_encoder, dtype="float32", top_n=None, **options)
    found = reranker.compress_documents([Document(page_content=text) for text in texts], texts[0])
    scores = [document.metadata["relevance_score"] for document in found]
    np.testing.assert_allclose(scores, sorted(expected[:-1], reverse=True), atol=2e-5, rtol=1e-5)


def test_newlines_are_not_replaced(tmp_path: Path) -> None:
    """HuggingFaceEmbeddings replaces them by spaces; a byte-level tokenizer tells them apart."""
    model = str(write_checkpoint(tmp_path / "model", "modernbert", sentence_transformers=Layout(modules=(Pooling(),))))
    lines, spaces = "def f():\n    return 1\n\n# end", "def f():     return 1  # end"
    ours, client = MillpondEmbeddings(model=model, dtype="float32"), SentenceTransformer(model)
    np.testing.assert_allclose(ours.embed_documents([lines])[0], client.encode(lines), atol=2e-5)
    np.testing.assert_allclose(ours.embed_query(lines), client.encode(lines), atol=2e-5)
    assert np.abs(np.subtract(ours.embed_query(lines), ours.embed_query(spaces))).max() > 1e-3


def test_multi_process_starts_no_process(checkpoint: str, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("multiprocessing.process.BaseProcess.start", refuse)
    ours = MillpondEmbeddings(model_name=checkpoint, multi_process=True, dtype="float32", document_prompt="")
    np.testing.assert_allclose(ours.embed_documents(texts), SentenceTransformer(checkpoint).encode(texts), atol=2e-5)


def test_quantization_compile_and_long_texts_reach_the_engine(checkpoint: str, texts: list[str]) -> None:
    embeddings = MillpondEmbeddings(
        model=checkpoint, dtype="float32", query_prompt="", document_prompt="", long_texts="mean", max_length=12
    )
    long = " ".join(texts)
    with Engine(checkpoint, dtype="float32", max_length=12) as engine:
        expected = engine.embed([long], prompt="", long_texts="mean").embeddings
        np.testing.assert_allclose(embeddings.embed_documents([long]), expected, atol=1e-6)
        assert np.abs(expected - engine.embed([long], prompt="").embeddings).max() > 1e-3
    configured = MillpondEmbeddings(model=checkpoint, quantization="int8", compile=True)._configuration()
    assert (configured["quantization"], configured["compile"]) == ("int8", True)
    quantized = MillpondEmbeddings(model=checkpoint, dtype="float32", query_prompt="", quantization="int8")
    exact = MillpondEmbeddings(model=checkpoint, dtype="float32", query_prompt="")
    one, other = (np.asarray(each.embed_query("a wheel")) for each in (quantized, exact))
    assert np.abs(one - other).max() > 1e-4
    assert one @ other / np.linalg.norm(one) / np.linalg.norm(other) > 0.9


def test_the_options_of_fastembed_are_hints_or_refused_in_one_message(minilm: str) -> None:
    hints = {"threads": 4, "providers": ["CPUExecutionProvider"], "parallel": 0, "lazy_load": True, "batch_size": 256}
    embeddings = MillpondEmbeddings(model_name=minilm, doc_embed_type="passage", max_length=512, **hints)
    assert (embeddings.device, embeddings.max_length, embeddings.document_prompt) == ("cpu", 512, None)
    with pytest.raises(ValidationError) as raised:
        MillpondEmbeddings(model_name="BAAI/bge-small-en-v1.5", cache_dir="/models", **hints)
    (head, line) = str(raised.value).splitlines()
    assert "MillpondEmbeddings" in head
    assert "cache_dir='/models' is not available here; set HF_HUB_CACHE in the environment" in line
