"""The census: every published name has a verdict, found by the code that loads checkpoints, and the numbers add up."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from millpond.checkpoints.published import Published, published
from millpond.engine.census import Verdict, census, verdict

# What fastembed 0.9.1 lists of texts and can be served; its other names are of images, of BM25 or quantized.
FASTEMBED = """
BAAI/bge-base-en-v1.5 BAAI/bge-small-en-v1.5 BAAI/bge-large-en-v1.5 BAAI/bge-small-zh-v1.5 BAAI/bge-reranker-base
BAAI/bge-reranker-v2-m3 Xenova/ms-marco-MiniLM-L-6-v2 answerdotai/answerai-colbert-small-v1 colbert-ir/colbertv2.0
google/embeddinggemma-300m ibm-granite/granite-embedding-small-english-r2 intfloat/multilingual-e5-large
jinaai/jina-embeddings-v2-base-en jinaai/jina-embeddings-v2-base-code jinaai/jina-embeddings-v2-small-en
jinaai/jina-embeddings-v3 jinaai/jina-colbert-v2 jinaai/jina-reranker-v1-turbo-en
jinaai/jina-reranker-v2-base-multilingual lightonai/LateOn lightonai/mLateOn minishlab/potion-base-8M
minishlab/potion-multilingual-128M mixedbread-ai/mxbai-embed-large-v1 nomic-ai/nomic-embed-text-v1.5
opensearch-project/opensearch-neural-sparse-encoding-doc-v3-gte prithivida/Splade_PP_en_v1 thenlper/gte-large
sentence-transformers/all-MiniLM-L6-v2 sentence-transformers/paraphrase-multilingual-mpnet-base-v2
Snowflake/snowflake-arctic-embed-m-long Qwen/Qwen3-Embedding-0.6B
""".split()


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    return {each.name: each for each in census()}


def test_every_name_has_one_verdict_and_the_numbers_add_up(verdicts: dict[str, Verdict]) -> None:
    names = [name for layout in published() for name in layout.names]
    assert len(names) == len(set(names)) == len(verdicts) >= 150
    assert verdicts.keys() == set(names)
    served = [each for each in verdicts.values() if each.served]
    refused = [each for each in verdicts.values() if not each.served]
    assert len(served) + len(refused) == len(names)
    assert len(served) >= 375
    assert all(each.tasks and each.family and each.backend in ("native", "torch") for each in served)
    assert all(not each.tasks and not each.family for each in refused)


def test_what_is_refused_is_said_in_one_sentence_of_the_checkpoint(verdicts: dict[str, Verdict]) -> None:
    for each in verdicts.values():
        if not each.served:
            assert each.reason.startswith(each.name), each.reason
            assert "\n" not in each.reason and "Error" not in each.reason and "/tmp" not in each.reason
            assert len(each.reason) < 420, each.reason


def test_what_fastembed_lists_is_served(verdicts: dict[str, Verdict]) -> None:
    assert [name for name in FASTEMBED if not verdicts[name].served] == []


@pytest.mark.parametrize(
    ("name", "tasks"),
    [
        ("BAAI/bge-small-en-v1.5", {"embed", "token_embed"}),
        ("Qwen/Qwen3-Reranker-0.6B", {"classify", "reward", "score", "token_classify"}),
        ("naver/splade-v3", {"sparse_embed"}),
        ("naver/splade-code-06B", {"sparse_embed"}),
        ("jinaai/jina-embeddings-v5-text-nano", {"embed", "token_embed"}),
        ("voyageai/voyage-4-nano", {"embed", "token_embed"}),
        ("fastino/gliner2-base-v1", {"token_classify"}),
        ("lightonai/LateOn", {"score", "token_embed"}),
        ("dslim/bert-base-NER", {"token_classify"}),
    ],
)
def test_the_tasks_are_those_of_the_files(name: str, tasks: set[str], verdicts: dict[str, Verdict]) -> None:
    assert set(verdicts[name].tasks) == tasks


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "castorini/repllama-v1-7b-lora-passage",
            "adapter of PEFT, with which its base model, meta-llama/Llama-2-7b-hf",
        ),
        ("codesage/codesage-base-v2", "jinaai/jina-embeddings-v2-base-code"),
        ("Qdrant/bm25", "stop words for BM25, .* naver/splade-v3"),
        ("Qdrant/minicoil-v1", "BM25 whose words"),
        ("Qdrant/constella-zero", "table of token vectors for queries .* NovaSearch/stella_en_400M_v5"),
        ("jxm/cde-small-v2", "a sample of the corpus"),
        ("nomic-ai/nomic-embed-vision-v1.5", "a tower for images, .* nomic-ai/nomic-embed-text-v1.5"),
    ],
)
def test_what_is_refused_is_named_with_what_is_near(name: str, said: str, verdicts: dict[str, Verdict]) -> None:
    assert re.search(said, verdicts[name].reason), verdicts[name].reason
    for near in re.findall(r"[\w.-]+/[\w.-]*\w", verdicts[name].reason.removeprefix(name)):
        assert near not in verdicts or verdicts[near].served, near


def changed(name: str, **config: object) -> Published:
    layout = next(layout for layout in published() if name in layout.names)
    return replace(layout, config={**layout.config, **config})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "zyx"}, "of model_type 'zyx'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized by GPTQ"),
        ({"position_embedding_type": "relative"}, "relative"),
        ({"auto_map": {"AutoModel": "modeling.Mine"}}, "modeling.Mine"),
    ],
)
def test_another_layout_has_another_verdict(config: dict[str, object], said: str, tmp_path: Path) -> None:
    """The negative control: nothing is said of a name, but of its files."""
    name = "BAAI/bge-small-en-v1.5"
    assert verdict(name, changed(name), tmp_path / "as published").served
    found = verdict(name, changed(name, **config), tmp_path / "changed")
    assert not found.served and said in found.reason
