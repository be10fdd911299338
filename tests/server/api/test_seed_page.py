"""The commands of vLLM's page about pooling models, with millpond instead of vllm: flags, names and curl."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.server.conftest import running
from tests.tiny import Layout, Normalize, Pooling, write_checkpoint
from tests.tiny.heads import write_pylate, write_stanford

from millpond import Engine
from millpond.server import ServedModels

pytestmark = [pytest.mark.contract, pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")]

PATIENCE = "300"  # seconds

EMBEDDINGS = """\
curl http://localhost:8000/v1/embeddings \\
  -H "Content-Type: application/json" \\
  -d '{
    "input": "Hello, my name is",
    "model": "intfloat/e5-small"
  }'
"""
SCORE = """\
curl http://localhost:8000/score \\
  -H "Content-Type: application/json" \\
  -d '{
    "model": "BAAI/bge-reranker-v2-m3",
    "text_1": "What is machine learning?",
    "text_2": ["ML is a subset of AI.", "The weather is sunny."]
  }'
"""
RERANK = """\
curl http://localhost:8000/rerank \\
  -H "Content-Type: application/json" \\
  -d '{
    "model": "answerdotai/answerai-colbert-small-v1",
    "query": "What is machine learning?",
    "documents": [
      "Machine learning is a subset of AI.",
      "Python is a programming language."
    ]
  }'
"""
QUESTION = "What is machine learning?"
DOCUMENTS = ["Machine learning is a subset of AI.", "Python is a programming language."]


def embedder(folder: Path) -> Path:
    return write_checkpoint(folder, "bert", sentence_transformers=Layout(modules=(Pooling(), Normalize())))


def reranker(folder: Path) -> Path:
    return write_checkpoint(folder, "xlm-roberta", head="SequenceClassification", labels=1)


@pytest.fixture
def serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any
) -> Callable[[str, Callable[[Path], Path]], Any]:
    """Runs a serve command of the page beside a folder called as the hub's model; yields where the server is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MILLPOND_DTYPE", "float32")  # some processors would be given bfloat16

    @contextmanager
    def serving(line: str, write: Callable[[Path], Path]) -> Iterator[str]:
        program, verb, *words = typed(line)
        assert (program, verb) == ("vllm", "serve")
        (tmp_path / words[0]).parent.mkdir(exist_ok=True)
        write(tmp_path / words[0])
        models, config = command(*words)
        assert (config.host, config.port) == ("127.0.0.1", 8000)
        with running(ServedModels.load(models), config) as address:
            yield address

    return serving


def typed(text: str) -> list[str]:
    """The words of a command, split as in a shell."""
    return shlex.split(text.replace("\\\n", " "))


def curl(text: str, address: str) -> Any:
    """The output of a command of the page, sent to ``address`` instead."""
    program, *words = typed(text.replace("http://localhost:8000", address))
    assert program == "curl" and address in words[0]
    words += ["--silent", "--show-error", "--max-time", PATIENCE, "--noproxy", "*"]
    ended = subprocess.run([program, *words], capture_output=True, check=True, text=True)
    return json.loads(ended.stdout)


def test_embeddings(serving: Any, tmp_path: Path) -> None:
    with serving("vllm serve intfloat/e5-small", embedder) as address:
        answer = curl(EMBEDDINGS, address)
    with Engine(str(tmp_path / "intfloat/e5-small"), dtype="float32") as engine:
        expected = engine.embed(["Hello, my name is"])
    assert (answer["object"], answer["model"]) == ("list", "intfloat/e5-small")
    (item,) = answer["data"]
    assert (item["object"], item["index"]) == ("embedding", 0)
    np.testing.assert_allclose(item["embedding"], expected.embeddings[0], atol=1e-6)
    assert answer["usage"]["prompt_tokens"] == expected.usage.prompt_tokens


def test_score(serving: Any, tmp_path: Path) -> None:
    with serving("vllm serve BAAI/bge-reranker-v2-m3", reranker) as address:
        answer = curl(SCORE, address)
    with Engine(str(tmp_path / "BAAI/bge-reranker-v2-m3"), dtype="float32") as engine:
        expected = engine.score(QUESTION, ["ML is a subset of AI.", "The weather is sunny."]).scores
    assert answer["model"] == "BAAI/bge-reranker-v2-m3"
    assert [(item["index"], item["object"]) for item in answer["data"]] == [(0, "score"), (1, "score")]
    np.testing.assert_allclose([item["score"] for item in answer["data"]], expected, atol=1e-6)
    assert abs(expected[0] - expected[1]) > 1e-4


BERT = "answerdotai/answerai-colbert-small-v1"
MODERN = "lightonai/GTE-ModernColBERT-v1"
OVERRIDE = '{"architectures": ["ColBERTModernBertModel"]}'


@pytest.mark.parametrize(
    ("line", "model", "write", "overrides"),
    [
        (f"vllm serve {BERT}", BERT, write_stanford, None),
        (f"vllm serve {MODERN} \\\n  --hf-overrides '{OVERRIDE}'", MODERN, write_pylate, json.loads(OVERRIDE)),
        (f"vllm serve {MODERN}", MODERN, write_pylate, None),  # which needs no flag here
    ],
)
def test_rerank(
    serving: Any, tmp_path: Path, line: str, model: str, write: Callable[[Path], Path], overrides: Any
) -> None:
    with serving(line, write) as address:
        answer = curl(RERANK.replace(BERT, model), address)
    with Engine(str(tmp_path / model), dtype="float32", hf_overrides=overrides) as engine:
        assert engine.spec.score_type == "late-interaction"
        expected = engine.rerank(QUESTION, DOCUMENTS)
    assert answer["model"] == model
    assert [item["index"] for item in answer["results"]] == [each.index for each in expected]
    assert [item["document"] for item in answer["results"]] == [{"text": DOCUMENTS[each.index]} for each in expected]
    scores = [item["relevance_score"] for item in answer["results"]]
    np.testing.assert_allclose(scores, [each.relevance_score for each in expected], atol=1e-5)
    assert scores[0] > scores[1]
