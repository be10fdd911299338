"""LangChain's ``init_embeddings`` has a fixed list of providers; the day it takes others, this fails."""

from __future__ import annotations

import warnings
from typing import Any

import pytest


@pytest.mark.parametrize("module", ["langchain.embeddings", "langchain_classic.embeddings"])
def test_init_embeddings_takes_no_provider_of_its_users(module: str) -> None:
    init_embeddings: Any = pytest.importorskip(module).init_embeddings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="'millpond' is not supported"):
            init_embeddings("millpond:sentence-transformers/all-MiniLM-L6-v2")
        with pytest.raises(ValueError, match="'millpond' is not supported"):
            init_embeddings("sentence-transformers/all-MiniLM-L6-v2", provider="millpond")
