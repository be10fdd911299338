"""The lines that built LlamaIndex's own classes: the same vectors and scores, or an error with the line to write."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llama_index.core.postprocessor import SentenceTransformerRerank
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from pydantic import ValidationError
from tests.tiny.heads import write_cross_encoder, write_stanford

from llama_index.embeddings.millpond import MillpondEmbedding
from llama_index.postprocessor.millpond_rerank import MillpondRerank
from llama_index.retrievers.millpond import MillpondColBERTRetriever
from llama_index.sparse_embeddings.millpond import MillpondSparseEmbedding
from millpond import Engine
from millpond.compat import notices as notices_module
from millpond.errors import InvalidRequestError
from millpond.late_interaction import MemoryIndex

QUESTION = "What makes dough rise?"


@pytest.fixture
def notices(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """The warnings of the adapters so far, of a process that has logged none before."""
    monkeypatch.setattr(notices_module, "_logged", type(notices_module._logged)())
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


def test_an_existing_index_of_a_checkpoint_with_prompts_is_protected(
    prompted: str, engine: Engine, notices: Callable[[], list[str]]
) -> None:
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


async def test_the_notice_comes_with_the_first_embedding_of_any_method(
    prompted: str, notices: Callable[[], list[str]]
) -> None:
    embedding = MillpondEmbedding(prompted, dtype="float32")
    assert notices() == []
    await embedding.aget_query_embedding("tides")
    await embedding.aget_text_embedding_batch(["tides"])
    assert len(notices()) == 1


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


def test_without_prompts_nothing_is_told(minilm: str, notices: Callable[[], list[str]]) -> None:
    MillpondEmbedding(minilm, dtype="float32").get_query_embedding("tides")
    MillpondEmbedding(minilm, dtype="float32", query_prompt="ask: ").get_text_embedding("tides")
    assert notices() == []


def test_auto_puts_the_model_cards_prompt_before_a_query(minilm: str, engine: Engine, tmp_path: Path) -> None:
    for name in ("bge-small-en-v1.5", "unknown"):
        (tmp_path / name).mkdir()
        for entry in Path(minilm).iterdir():
            (tmp_path / name / entry.name).symlink_to(entry)
    embedding = MillpondEmbedding(tmp_path / "bge-small-en-v1.5", dtype="float32", query_prompt="auto")
    prompt = "Represent this sentence for searching relevant passages: "
    expected = engine.embed(["tides", prompt + "tides"]).embeddings
    np.testing.assert_allclose(embedding.get_query_embedding("tides"), expected[1], atol=1e-5)
    np.testing.assert_allclose(embedding.get_text_embedding("tides"), expected[0], atol=1e-5)
    assert np.abs(expected[0] - expected[1]).max() > 1e-3
    unknown = MillpondEmbedding(tmp_path / "unknown", dtype="float32", query_prompt="auto")
    assert unknown.get_text_embedding("tides")
    with pytest.raises(InvalidRequestError, match=r'query_prompt="auto": the files of .* write query_prompt='):
        unknown.get_query_embedding("tides")


def test_a_prompt_is_chosen_by_its_name(prompted: str, engine: Engine) -> None:
    swapped = MillpondEmbedding(prompted, dtype="float32", query_prompt_name="document", document_prompt_name="query")
    expected = engine.embed(["search_query: tides", "search_document: tides"]).embeddings
    np.testing.assert_allclose(swapped.get_text_embedding("tides"), expected[0], atol=1e-5)
    np.testing.assert_allclose(swapped.get_query_embedding("tides"), expected[1], atol=1e-5)
    with pytest.raises(InvalidRequestError, match="query_prompt_name='ask' is no prompt of"):
        MillpondEmbedding(prompted, dtype="float32", query_prompt_name="ask").get_query_embedding("tides")
    with pytest.raises(ValidationError, match="contradict each other"):
        MillpondEmbedding("a", query_prompt="b", query_prompt_name="c")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"backend": "onnx"}, 'leave it out, and write dtype="bfloat16" or quantization="int8"'),
    ({"backend": "openvino"}, 'leave it out, and write dtype="bfloat16"'),
    ({"tokenizer_name": "bert-base-uncased"}, "the tokenizer is that of the checkpoint; leave it out"),
    ({"tokenizer": object()}, "the tokenizer is that of the checkpoint; leave it out"),
    ({"cache_folder": "/models"}, "set HF_HUB_CACHE=/models before Python starts"),
    ({"token": "hf_secret"}, "HF_TOKEN"),
    ({"query_prompt": "a", "query_instruction": "b"}, "contradict each other; pass one of them"),
    ({"model_kwargs": {"load_in_4bit": True}}, 'write quantization="int8" instead'),
    ({"parallel_process": "yes"}, "must be True or False"),
    ({"providers": ["CUDAExecutionProvider"]}, 'write device="cuda"'),
    ({"doc_embed_type": "query"}, 'write document_prompt="..." instead'),
    ({"query_instruction": ""}, 'write query_prompt="Represent this question'),
    ({"nobody_knows": 1}, "nobody_knows\n.*not permitted"),
]


@pytest.mark.parametrize(
    ("options", "message"), REFUSED, ids=[next(iter(options)) + str(n) for n, (options, _) in enumerate(REFUSED)]
)
def test_what_would_change_vectors_is_refused_with_the_line_to_write(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=f"(?i){message}") as caught:
        MillpondEmbedding(model_name="BAAI/bge-small-en-v1.5", **options)
    assert "hf_secret" not in str(caught.value)


def test_secrets_are_in_no_error_and_no_dict() -> None:
    for options in (
        {"api_key": "hf_secret"},
        {"model_kwargs": {"token": "hf_secret"}},
        {"use_auth_token": "hf_secret"},
    ):
        for build in (MillpondEmbedding, MillpondRerank, MillpondSparseEmbedding, MillpondEmbedding.model_validate):
            with pytest.raises(ValidationError) as caught:
                build(model="a", **options) if isinstance(build, type) else build({"model": "a", **options})
            assert "hf_secret" not in f"{caught.value} {caught.value.errors()} {caught.value.json()}"


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (None, "auto"),
        ("cpu", "cpu"),
        (["cuda:0", "cuda:1"], "cuda:0,cuda:1"),
        (("cpu",), "cpu"),
        (torch.device("cuda:1"), "cuda:1"),
        (1, "cuda:1"),
        ([0, 1], "cuda:0,cuda:1"),
    ],
    ids=["none", "str", "list", "tuple", "torch", "number", "numbers"],
)
@pytest.mark.parametrize("adapter", [MillpondEmbedding, MillpondRerank, MillpondSparseEmbedding])
def test_a_device_may_be_none_or_several(adapter: Any, device: Any, expected: str) -> None:
    assert adapter("a", device=device).device == expected
    assert adapter(model="a", trust_remote_code=True).trust_remote_code is False


def test_fast_embed_embeddings_options() -> None:
    built = MillpondEmbedding("a", threads=4, doc_embed_type="default", providers=None)
    assert built.document_prompt == ""
    assert MillpondEmbedding("a", doc_embed_type="passage").document_prompt is None


def test_the_options_of_fast_embeds_sparse_models() -> None:
    assert MillpondSparseEmbedding("a", cuda=True, device_ids=[0, 1]).device == "cuda:0,cuda:1"
    assert MillpondSparseEmbedding("a", providers=["CPUExecutionProvider"], batch_size=256).device == "cpu"
    with pytest.raises(ValidationError, match="Qdrant/bm25 counts words.*write model= a SPLADE checkpoint"):
        MillpondSparseEmbedding("Qdrant/bm25")


@pytest.mark.parametrize("adapter", [MillpondEmbedding, MillpondRerank, MillpondSparseEmbedding])
def test_model_and_model_name_are_accepted_and_readable(adapter: Any, tmp_path: Path) -> None:
    for built in (adapter("a"), adapter(model="a"), adapter(model_name="a"), adapter.model_validate({"model": "a"})):
        assert (built.model, built.model_name) == ("a", "a")
    assert adapter(tmp_path).model == str(tmp_path)
    for options in ({"model": "b"}, {"model_name": "b"}):
        with pytest.raises(TypeError, match="twice: 'a' and model"):
            adapter("a", **options)
    assert adapter(model="a", model_name="a").model == "a"
    with pytest.raises(ValidationError, match="model='a' and model_name='b' contradict each other"):
        adapter(model="a", model_name="b")


def test_an_adapter_over_an_engine_tells_its_model(engine: Engine) -> None:
    for adapter in (MillpondEmbedding, MillpondRerank, MillpondSparseEmbedding):
        assert adapter(engine=engine).model_name == engine.spec.name


def test_what_model_dump_writes_builds_an_equal_adapter() -> None:
    for built in (MillpondEmbedding("a", query_prompt="q: "), MillpondRerank("a", 2), MillpondSparseEmbedding("a")):
        again = type(built)(**built.model_dump())
        assert again.model_dump() == built.model_dump()


def test_the_retriever_tells_its_model(engine: Engine) -> None:
    retriever = MillpondColBERTRetriever(MemoryIndex(engine))
    assert retriever.model == retriever.model_name == engine.spec.name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "owner/colbert"}, r"write MillpondColBERTRetriever\(MemoryIndex\(Engine\('owner/colbert'\)\)\)"),
        ({"model_name": "owner/colbert"}, r"MemoryIndex\(Engine\('owner/colbert'\)\)"),
        ({"engine": None}, r"MemoryIndex\(engine\)"),
        ({"k": 3}, "k=3 is not an option; write similarity_top_k=3"),
        ({"top_n": 3}, "write similarity_top_k=3"),
        ({"gpus": 1}, "gpus=1 is not an option of MillpondColBERTRetriever"),
    ],
    ids=["model", "model_name", "engine", "k", "top_n", "unknown"],
)
def test_the_retriever_refuses_other_options_with_the_line_to_write(
    engine: Engine, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        MillpondColBERTRetriever(MemoryIndex(engine), **options)


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_cross_encoder(tmp_path_factory.mktemp("ranker") / "model"))


def hits_of(texts: list[str]) -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(text=text, metadata={"n": n}), score=n / 20) for n, text in enumerate(texts)]


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
    ranker: str, texts: list[str], build: Callable[[Any, str], Any]
) -> None:
    replaced, ours = build(SentenceTransformerRerank, ranker), build(MillpondRerank, ranker)
    assert (ours.top_n, ours.model, ours.model_name) == (5, ranker, ranker)
    expected = replaced.postprocess_nodes(hits_of(texts), query_str=QUESTION)
    exact = ours.model_copy(update={"dtype": "float32"})  # half precision, where the machine is fast at it, differs
    found = exact.postprocess_nodes(hits_of(texts), query_str=QUESTION)
    assert [hit.node.metadata["n"] for hit in found] == [hit.node.metadata["n"] for hit in expected]
    np.testing.assert_allclose([hit.score for hit in found], [hit.score for hit in expected], atol=1e-4)


def test_model_and_top_n_may_be_positional(ranker: str) -> None:
    for built in (MillpondRerank(ranker, 5), MillpondRerank(5, ranker), MillpondRerank(ranker, top_n=5)):
        assert (built.model, built.top_n) == (ranker, 5)
    assert MillpondRerank(Path(ranker)).top_n == 3
    with pytest.raises(TypeError, match=r"got 3 positional arguments: \(5, 'a', 'cpu'\); pass the others by name"):
        MillpondRerank(5, "a", "cpu")
    with pytest.raises(TypeError, match="top_n twice: 5 and top_n=6"):
        MillpondRerank("a", 5, top_n=6)
    with pytest.raises(TypeError, match="model_name without their names|positional arguments"):
        MillpondEmbedding("a", "b")


def test_the_options_of_other_rerankers() -> None:
    flag = MillpondRerank(top_n=2, model="BAAI/bge-reranker-large", use_fp16=False)
    assert (flag.dtype, flag.top_n) == ("float32", 2)
    assert MillpondRerank("a", use_fp16=True).dtype == "auto"
    colbert = MillpondRerank(5, "a", tokenizer="a", keep_retrieval_score=None)
    assert colbert.keep_retrieval_score is False
    crossed = MillpondRerank("a", cross_encoder_kwargs={"max_length": 9, "model_kwargs": {"dtype": "float16"}})
    assert (crossed.max_length, crossed.dtype) == (9, "float16")
    for options, message in (
        ({"tokenizer": "b"}, "the tokenizer is that of the checkpoint; leave it out"),
        ({"cross_encoder_kwargs": {"num_labels": 3}}, "a reranker has one score; leave it out"),
        ({"backend": "onnx"}, 'leave it out, and write dtype="bfloat16"'),
        ({"use_fp16": "yes"}, "must be True or False"),
    ):
        with pytest.raises(ValidationError, match=message):
            MillpondRerank("a", **options)


def test_auto_of_an_embedding_checkpoint_says_its_method(
    minilm: str, ranker: str, tmp_path: Path, texts: list[str], notices: Callable[[], list[str]]
) -> None:
    colbert = str(write_stanford(tmp_path / "colbert"))
    for options in ({"model": ranker}, {"model": colbert}, {"model": minilm, "method": "cosine"}):
        MillpondRerank(**options).postprocess_nodes(hits_of(texts), query_str=QUESTION)
    assert notices() == []
    for _ in range(2):
        MillpondRerank(minilm).postprocess_nodes(hits_of(texts), QueryBundle(QUESTION))
    (told,) = notices()
    assert "was trained to embed, not to rerank: its pairs are scored by MaxSim" in told
    assert 'Write method="maxsim"' in told
