"""The page's examples look right with the model that most people try first."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import millpond.server
from millpond import Engine

pytestmark = pytest.mark.contract

TOOLS = Path(millpond.server.__file__).parent / "api/page/tools"


def texts_of(name: str, constant: str) -> list[str]:
    """The texts of a list in one of the page's tools."""
    source = (TOOLS / name).read_text(encoding="utf-8")
    found = re.search(rf"const {constant} = \[(.*?)\];", source, re.DOTALL)
    assert found
    return re.findall(r'"(.*?)"', found[1])


def test_the_examples_of_the_page_look_right(minilm_folder: Path) -> None:
    with Engine(str(minilm_folder), dtype="float32") as engine:
        texts = texts_of("similarity.js", "EXAMPLES")
        vectors = engine.embed(texts).embeddings
        cosines = np.triu(vectors @ vectors.T, k=1)
        nearest = [texts[i] for i in np.unravel_index(cosines.argmax(), cosines.shape)]
        assert nearest == ["Water from the pond turns the wheel of the mill.", "The mill is driven by water."]
        assert cosines.max() > 2 * np.sort(cosines, axis=None)[-2]  # at first sight

        documents = texts_of("rerank.js", "DOCUMENTS")
        for method in ("cosine", "maxsim"):
            ranking = engine.rerank("How is the wheel driven?", documents, method=method)
            assert [documents.index(each.document) for each in ranking][:2] == [1, 3]
