"""Pairs with a common prefix, which is computed once: each has the score that it has alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.tiny import SENTENCES, write_checkpoint

from millpond import Engine

pytestmark = pytest.mark.contract  # two engines for each case, one of them a peer's

TEMPLATE = (
    "Judge whether the document answers the query, and say yes or no.\n<Query>: {{ messages[0].content }}\n"
    "<Document>: {{ messages[1].content }}\nAnswer:"
)
DOCUMENTS = (*SENTENCES, "a", "", SENTENCES[3], SENTENCES[0] + " " + SENTENCES[1])


def load(folder: Path, family: str) -> Engine:
    """A language model with a score head of one label."""
    config = {"max_position_embeddings": 256, "n_positions": 256}
    write_checkpoint(folder, family, head="SequenceClassification", labels=1, config=config, tokenizer_limit=None)
    return Engine(folder, dtype="float32", device="cpu", score_template=TEMPLATE)


@pytest.mark.parametrize("family", ["qwen3", "qwen2-sliding", "gemma2", "mistral-sliding", "gpt2"])
def test_scores_equal_those_of_pairs_alone(family, tmp_path):
    """Those of one query, and those of several, which share with their own documents only."""
    queries = ["How much water does one sack of wheat need?"] * len(DOCUMENTS)
    with load(tmp_path / "model", family) as engine:
        for asked in (queries, [SENTENCES[i % 3] for i in range(len(DOCUMENTS))]):
            shared = engine.score(asked, DOCUMENTS, activation=False).scores
            pairs = zip(asked, DOCUMENTS, strict=True)
            alone = np.concatenate([engine.score(*pair, activation=False).scores for pair in pairs])
            assert np.abs(shared - alone).max() <= 1e-5 * np.abs(alone).max()
            assert np.ptp(alone) > 0.1 * np.abs(alone).max()
