"""The lines that built LlamaIndex's own classes: the same vectors and scores, or an error with the line to write."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_index.core.postprocessor import SentenceTransformerRerank
from llama_index.core.schema import NodeWithScore, QueryBundle
from tests.adapters import QUESTION, write_prompted
from tests.tiny.heads import write_stanford

from llama_index.embeddings.millpond import MillpondEmbedding
from llama_index.postprocessor.millpond_rerank import MillpondRerank


@pytest.fixture
def notices(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The warnings of the adapters so far; they are logged once in a process, of a folder of the test's own."""
    caplog.set_level(logging.WARNING)
    return lambda: [
        one.getMessage() for one in caplog.records if one.name.startswith(("millpond.compat", "llama_index"))
    ]


EQUAL: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"normalize": True}, {"normalize": True}),
    ({"query_instruction": "ask: "}, {"query_prompt": "ask: ", "document_prompt": ""}),
    ({"text_instruction": "passage: "}, {"document_prompt": "passage: "}),
    (
        {"query_instruction": "ask: ", "text_instruction": "passage: "},
        {"query_prompt": "ask: ", "document_prompt": "passage: "},
    ),
    ({"max_length": 8}, {"max_length": 8}),
    ({"device": "cpu", "trust_remote_code": True, "embed_batch_size": 3, "num_workers": 2}, {"device": "cpu"}),
    ({"device": None, "cache_folder": "/no/such/folder", "show_progress_bar": False}, {"device": "auto"}),
    ({"tokenizer_name": "deprecated", "pooling": "deprecated", "model": "deprecated"}, {"pooling": None}),
    ({"backend": "torch", "similarity_fn_name": "cosine"}, {"revision": None}),
    ({"model_kwargs": {"torch_dtype": "float32"}, "tokenizer_kwargs": {"padding_side": "right"}}, {"dtype": "float32"}),
    ({"parallel_process": False, "target_devices": ["cpu"]}, {"device": "auto"}),
]


@pytest.mark.torch
@pytest.mark.parametrize(("options", "fields"), EQUAL, ids=[",".join(options) or "none" for options, _ in EQUAL])
def test_a_line_of_hugging_face_embedding_gives_its_vectors(
    minilm: str, texts: list[str], options: dict[str, Any], fields: dict[str, Any]
) -> None:
    module = pytest.importorskip("llama_index.embeddings.huggingface")
    line = {"model_name": minilm, **options}
    ours = MillpondEmbedding(**{"dtype": "float32", **line} if "model_kwargs" not in line else line)
    assert {name: getattr(ours, name) for name in fields} == fields
    replaced = module.HuggingFaceEmbedding(**{name: value for name, value in line.items() if name != "num_workers"})
    np.testing.assert_allclose(
        ours.get_text_embedding_batch(texts), replaced.get_text_embedding_batch(texts), atol=2e-5
    )
    np.testing.assert_allclose(ours.get_query_embedding(QUESTION), replaced.get_query_embedding(QUESTION), atol=2e-5)


@pytest.mark.torch
def test_an_existing_index_of_a_checkpoint_with_prompts_is_protected(
    minilm: str, tmp_path: Path, notices: Callable[[], list[str]]
) -> None:
    prompted = str(write_prompted(tmp_path / "prompted", minilm))
    module = pytest.importorskip("llama_index.embeddings.huggingface")
    replaced = module.HuggingFaceEmbedding(prompted)
    old = np.array([replaced.get_text_embedding("tides"), replaced.get_query_embedding("tides")])
    before = len(notices())
    ours = MillpondEmbedding(prompted, dtype="float32")
    new = np.array([ours.get_text_embedding("tides"), ours.get_query_embedding("tides")])
    ours.get_text_embedding_batch(["more", "texts"])
    (told,) = notices()[before:]
    assert np.abs(new - old).max() > 1e-3
    assert 'queries get the prompt "search_query: " (HuggingFaceEmbedding: no prompt)' in told
    line = 'query_prompt="", document_prompt="", dtype="float32"'
    assert f"To keep its vectors: {line}." in told
    kept: MillpondEmbedding = eval(f"MillpondEmbedding({prompted!r}, {line})")
    same = np.array([kept.get_text_embedding("tides"), kept.get_query_embedding("tides")])
    np.testing.assert_allclose(same, old, atol=2e-5)
    assert len(notices()) == before + 1


@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "options"),
    [("hkunlp/instructor-base", {}), ("owner/name", {"normalize": False})],
    ids=["an-instructor", "normalize-false"],
)
def test_the_notices_advice_gives_the_old_vectors(
    minilm: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    notices: Callable[[], list[str]],
    name: str,
    options: dict[str, Any],
) -> None:
    """The folder has the name of a hub id, as sentence-transformers and LlamaIndex go by names."""
    huggingface = pytest.importorskip("llama_index.embeddings.huggingface")
    (tmp_path / name).mkdir(parents=True)
    for entry in Path(minilm).iterdir():  # a folder of its own, as engines are shared by the real path
        (tmp_path / name / entry.name).symlink_to(entry)
    monkeypatch.chdir(tmp_path)
    replaced = huggingface.HuggingFaceEmbedding(name, **options)
    MillpondEmbedding(name, **options).get_query_embedding(QUESTION)
    (line,) = notices()
    found = re.search(r"To keep its vectors: (.*?\"float32\")", line)
    assert found is not None
    advice = eval(f"dict({found[1]})")
    kept = MillpondEmbedding(name, **{**options, **advice})
    texts = ["A zip archive.", "The mill pond feeds the water wheel."]
    for role in ("get_query_embedding", "get_text_embedding"):
        old, new = ([getattr(adapter, role)(text) for text in texts] for adapter in (replaced, kept))
        np.testing.assert_allclose(new, old, atol=1e-5)


@pytest.mark.torch
@pytest.mark.parametrize(
    "build",
    [
        lambda cls, model: cls(model=model, top_n=5),
        lambda cls, model: cls(top_n=5, model=model, device="cpu", keep_retrieval_score=False, trust_remote_code=False),
        lambda cls, model: cls(5, model),
        lambda cls, model: cls(5, model=model),
        lambda cls, model: cls(model=model, top_n=5, device=None, trust_remote_code=True),
    ],
    ids=["names", "all-names", "positional", "top_n-positional", "device-none"],
)
def test_a_line_of_sentence_transformer_rerank_gives_its_scores(
    cross_encoder: str, hits: list[NodeWithScore], build: Callable[[Any, str], Any]
) -> None:
    replaced, ours = build(SentenceTransformerRerank, cross_encoder), build(MillpondRerank, cross_encoder)
    assert (ours.top_n, ours.model, ours.model_name) == (5, cross_encoder, cross_encoder)
    expected = replaced.postprocess_nodes(hits, query_str=QUESTION)
    exact = ours.model_copy(update={"dtype": "float32"})  # half precision, where the machine is fast at it, differs
    found = exact.postprocess_nodes(hits, query_str=QUESTION)
    assert [hit.node.metadata["n"] for hit in found] == [hit.node.metadata["n"] for hit in expected]
    np.testing.assert_allclose([hit.score for hit in found], [hit.score for hit in expected], atol=1e-4)


def test_model_and_top_n_may_be_positional(cross_encoder: str) -> None:
    for built in (MillpondRerank(cross_encoder, 5), MillpondRerank(5, cross_encoder)):
        assert (built.model, built.top_n) == (cross_encoder, 5)
    assert MillpondRerank(Path(cross_encoder)).top_n == 3
    with pytest.raises(TypeError, match=r"got 3 positional arguments: \(5, 'a', 'cpu'\); pass the others by name"):
        MillpondRerank(5, "a", "cpu")
    with pytest.raises(TypeError, match="top_n twice: 5 and top_n=6"):
        MillpondRerank("a", 5, top_n=6)
    with pytest.raises(TypeError, match="model_name without their names|positional arguments"):
        MillpondEmbedding("a", "b")


def test_auto_of_an_embedding_checkpoint_says_its_method(
    minilm: str, cross_encoder: str, tmp_path: Path, hits: list[NodeWithScore], notices: Callable[[], list[str]]
) -> None:
    embedder, colbert = str(write_prompted(tmp_path / "embedder", minilm)), str(write_stanford(tmp_path / "colbert"))
    for options in ({"model": cross_encoder}, {"model": colbert}, {"model": embedder, "method": "cosine"}):
        MillpondRerank(**options).postprocess_nodes(hits, query_str=QUESTION)
    assert notices() == []
    for _ in range(2):
        MillpondRerank(embedder).postprocess_nodes(hits, QueryBundle(QUESTION))
    (told,) = notices()
    assert "was trained to embed, not to rerank: its pairs are scored by MaxSim" in told
    assert 'Write method="maxsim"' in told
