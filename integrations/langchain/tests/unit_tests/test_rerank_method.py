"""A reranker over an embedding checkpoint says once what it computes by default."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from tests.tiny import write_checkpoint
from tests.tiny.heads import write_cross_encoder, write_stanford

from langchain_millpond import MillpondCrossEncoder, MillpondReranker
from millpond.compat import notices

DOCUMENTS = [Document(page_content="the pond"), Document(page_content="a wheel")]


@pytest.fixture(autouse=True)
def nothing_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has logged none of the lines that are logged once."""
    monkeypatch.setattr(notices, "_logged", {})


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "MaxSim" in record.getMessage()]


@pytest.mark.parametrize("call", ["rerank", "arerank", "score"])
def test_an_embedder_reranks_by_maxsim_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    model = str(write_checkpoint(tmp_path / "model"))
    calls: dict[str, Any] = {
        "rerank": lambda: MillpondReranker(model=model).compress_documents(DOCUMENTS, "wheel"),
        "arerank": lambda: asyncio.run(MillpondReranker(model=model).acompress_documents(DOCUMENTS, "wheel")),
        "score": lambda: MillpondCrossEncoder(model=model).score([("wheel", "the pond")]),
    }
    calls[call]()
    (line,) = said(caplog)
    assert model in line
    assert 'method="maxsim"' in line
    assert 'method="cosine"' in line
    for other in calls.values():
        other()
    assert len(said(caplog)) == 1


@pytest.mark.parametrize("method", ["cosine", "maxsim"])
def test_who_names_the_method_is_told_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture, method: Any) -> None:
    model = str(write_checkpoint(tmp_path / "model"))
    MillpondReranker(model=model, method=method).compress_documents(DOCUMENTS, "wheel")
    assert said(caplog) == []


@pytest.mark.parametrize("write", [write_cross_encoder, write_stanford], ids=["cross-encoder", "colbert"])
def test_a_model_that_was_trained_to_rerank_is_told_nothing_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, write: Any
) -> None:
    model = str(write(tmp_path / "model"))
    MillpondReranker(model=model).compress_documents(DOCUMENTS, "wheel")
    assert said(caplog) == []
