"""A line that built HuggingFaceEmbeddings or HuggingFaceCrossEncoder builds our adapter, and means the same."""

from __future__ import annotations

import logging
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

PROMPTS = {"query": "ask: ", "document": "read: ", "topic": "sort: "}
SCORERS = (MillpondReranker, MillpondCrossEncoder)
ADAPTERS = (MillpondEmbeddings, *SCORERS)
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


@pytest.mark.parametrize("name", KWARGS)
def test_the_same_line_builds_the_replaced_class(checkpoint: str, texts: list[str], name: str) -> None:
    module = pytest.importorskip("langchain_huggingface")
    keep = {"query_prompt": "", "document_prompt": ""} if name in TOLD else {}
    theirs = module.HuggingFaceEmbeddings(model_name=checkpoint, **KWARGS[name])
    check_same(MillpondEmbeddings(model_name=checkpoint, dtype="float32", **KWARGS[name], **keep), theirs, texts[:4])


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


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_both_names_of_the_model_are_accepted_and_readable(adapter: Any, engine: Engine, tmp_path: Path) -> None:
    for built in (
        adapter(model="owner/name"),
        adapter(model_name="owner/name"),
        adapter(model_name_or_path="owner/name"),
    ):
        assert built.model == built.model_name == "owner/name"
        assert set(built.model_dump()) >= {"model"}
        assert "model_name" not in built.model_dump()
    assert adapter(model_name=tmp_path).model_name == str(tmp_path)
    assert adapter(engine=engine).model_name == engine.spec.name
    for both in ({"model": "a/b", "model_name": "a/b"}, {"model": None, "model_name": "a/b"}):
        assert adapter(**both).model == "a/b"
    with pytest.raises(ValidationError, match="model='a/b' and model_name='c/d' contradict each other"):
        adapter(model="a/b", model_name="c/d")


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize(
    ("device", "kept"),
    [
        (None, "auto"),
        ("cpu", "cpu"),
        (["cuda:0", "cuda:1"], "cuda:0,cuda:1"),
        (["cpu", "cpu"], "cpu"),
        (torch.device("cpu"), "cpu"),
        (1, "cuda:1"),
        ([0, 1], "cuda:0,cuda:1"),
    ],
    ids=["none", "name", "list", "duplicates", "torch", "number", "numbers"],
)
def test_a_device_is_none_a_name_or_a_list(adapter: Any, device: Any, kept: str) -> None:
    assert adapter(model="a", device=device).device == kept
    assert adapter(model="a", model_kwargs={"device": device}).device == kept


def test_no_device_and_one_in_a_list_load(checkpoint: str) -> None:
    vectors = [
        MillpondEmbeddings(model=checkpoint, device=device, dtype="float32", query_prompt="").embed_query("a wheel")
        for device in (None, ["cpu"], "cpu")
    ]
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-6)
    np.testing.assert_allclose(vectors[0], vectors[2], atol=1e-6)


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "onnx"}, 'leave it out, and write dtype="bfloat16"'),
        ({"model_kwargs": {"backend": "openvino"}}, 'leave it out, and write dtype="bfloat16"'),
        ({"cache_folder": "/models"}, "set HF_HUB_CACHE=/models before Python starts"),
        ({"model_kwargs": {"model_kwargs": {"load_in_8bit": True}}}, 'write quantization="int8" instead'),
        ({"model_kwargs": {"whatever": 1}}, r"model_kwargs\['whatever'\] is unknown"),
        ({"device": "cpu", "model_kwargs": {"device": "cuda"}}, "contradict each other"),
        ({"modelname": "b"}, "modelname\n.*not permitted"),
    ],
    ids=["backend", "nested", "cache_folder", "8bit", "unknown", "contradiction", "misspelled"],
)
def test_what_cannot_be_kept_is_refused_before_anything_is_loaded(
    adapter: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        adapter(model="owner/name", **options)
    with pytest.raises(ValidationError, match=message):
        adapter.model_validate({"model": "owner/name", **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encode_kwargs": {"precision": "int8"}}, 'output_dtype="int8"'),
        ({"model_kwargs": {"prompts": {"query": "q: "}}}, "Write query_prompt='q: ', document_prompt=''"),
        ({"multi_process": True, "encode_kwargs": {"normalize_embeddings": True}}, "leave multi_process out"),
        ({"sparse": True}, r"write MillpondSparseEmbeddings\(model=...\)"),
        ({"long_texts": "max"}, "'mean'"),
        ({"cross_encoder_kwargs": {}}, "not permitted"),
    ],
    ids=["precision", "prompts", "multi_process", "sparse", "long_texts", "cross_encoder"],
)
def test_options_that_embeddings_cannot_keep_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        MillpondEmbeddings(model="owner/name", **options)


@pytest.mark.parametrize("adapter", SCORERS)
@pytest.mark.parametrize("options", [{"encode_kwargs": {}}, {"query_instruction": "q"}], ids=["encode", "instruction"])
def test_options_of_embeddings_are_none_of_a_reranker(adapter: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="not permitted"):
        adapter(model="a", **options)


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize(
    "options",
    [
        {"token": "hf_secret"},
        {"model_kwargs": {"token": "hf_secret"}},
        {"model_kwargs": {"token": True, "model_kwargs": {"token": "hf_secret"}}},
        {"model_kwargs": {"use_auth_token": "hf_secret", "backend": "onnx"}},
        {"api_key": "hf_secret"},
        {"backend": "onnx", "token": "hf_secret"},
    ],
    ids=["token", "kwargs", "nested", "old-name", "unknown", "beside"],
)
def test_a_secret_is_in_no_message(adapter: Any, options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), pytest.raises(ValidationError) as caught:
        adapter(model="owner/name", **options)
    assert "hf_secret" not in str(caught.value) + repr(caught.value.errors()) + caplog.text


def test_the_callers_dicts_are_not_changed(checkpoint: str) -> None:
    model_kwargs = {"device": "cpu", "truncate_dim": 16}
    encode_kwargs = {"normalize_embeddings": True, "prompt": ""}
    MillpondEmbeddings(model_name=checkpoint, model_kwargs=model_kwargs, encode_kwargs=encode_kwargs)
    assert (len(model_kwargs), len(encode_kwargs)) == (2, 2)


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
