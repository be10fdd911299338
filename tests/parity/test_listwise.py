"""Listwise rerankers (jina-reranker-v3 and v3.5) beside transformers' backbone and the published prompt and rules."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tests.parity.comparison import TOLERANCE, VISIBLE
from tests.parity.oracles import oracle
from tests.tiny import SENTENCES
from tests.tiny.heads import headed

from millpond import Engine
from millpond.errors import InputTooLongError, InvalidRequestError, ModelLoadError, UnsupportedTaskError

pytestmark = pytest.mark.contract  # two engines for each case, one of them a peer's

QUERY = "How deep is it?"
DOCUMENTS = [SENTENCES[1], "", SENTENCES[8] + " " + SENTENCES[9], "A pond.", "Ein Teich, une étang, 池。", "A pond."]
MARKERS = ("<|embed_token|>", "<|rerank_token|>")
HEADS = {"projector.0.weight": (24, 48), "projector.2.weight": (16, 24)}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 40}


def write(folder: Path, *, newer: bool) -> Path:
    """A JinaForRanking as on the hub: tensors under ``model.`` and ``projector.``, the markers as added tokens."""
    config = {"auto_map": {"AutoModel": "modeling.JinaForRanking"}, **(WINDOWS if newer else {})}
    size = {"max_position_embeddings": 1 << 17}
    special = ("<|im_start|>", "<|im_end|>", *MARKERS)
    write = headed(
        "qwen3", size, "JinaForRanking", HEADS, prefix="model.", tokens=special, config=config, tokenizer_limit=1 << 17
    )
    return write(folder)


def prompt(query: str, documents: Sequence[str], *, newer: bool, instruction: str | None = None) -> str:
    """Of the model's own code."""
    text = (
        "<|im_start|>system\nYou are a search relevance expert who can determine a ranking of the passages based on "
        "how relevant they are to the query. If the query is a question, how relevant a passage is depends on how "
        "well it answers the question. If not, try to analyze the intent of the query and assess how well each "
        "passage satisfies the intent. If an instruction is provided, you should follow the instruction when "
        f"determining the ranking.<|im_end|>\n<|im_start|>user\nI will provide you with {len(documents)} passages, "
        "each indicated by a numerical identifier. Rank the passages based on their relevance to query: "
        f"{query}{'<|rerank_token|>' if newer else ''}\n"
    )
    if instruction:
        text += f"<instruct>\n{instruction}\n</instruct>\n"
    passages = [f'<passage id="{i}">\n{document}<|embed_token|>\n</passage>' for i, document in enumerate(documents)]
    text += "\n".join(passages) + f"\n<query>\n{query}<|rerank_token|>\n</query>"
    return text + "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class Reference:
    """The model in a folder."""

    def __init__(self, folder: Path, *, newer: bool) -> None:
        from transformers import AutoTokenizer

        self.newer = newer
        self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self.states, self.tensors = oracle(folder), load_file(folder / "model.safetensors")
        self.markers = self.tokenizer.convert_tokens_to_ids(list(MARKERS))

    @torch.inference_mode()
    def rows(self, query: str, documents: Sequence[str], *, asked: int = -1, **options: str) -> torch.Tensor:
        """Projected rows ``[documents + 1, d]``, that of the query last."""
        text = prompt(query, documents, newer=self.newer, **options)
        ids = torch.tensor(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        ends, asks = ((ids == marker).nonzero()[:, 0] for marker in self.markers)
        hidden = self.states(ids)[torch.cat((ends, asks[asked][None]))]
        hidden = F.linear(hidden, self.tensors["projector.0.weight"]).relu()
        return F.linear(hidden, self.tensors["projector.2.weight"])

    def scores(self, query: str, documents: Sequence[str], block: int = 125, **options: object) -> np.ndarray:
        """Cosines with the mean of the blocks' queries, each weighted by its best document."""
        parts = [documents[first : first + block] for first in range(0, len(documents), block)]
        rows = [self.rows(query, part, **options) for part in parts]  # type: ignore[arg-type]
        weights = [float(((1 + F.cosine_similarity(each[:-1], each[-1:])) / 2).max()) for each in rows]
        asked = torch.tensor(np.average([each[-1].numpy() for each in rows], axis=0, weights=weights))
        return F.cosine_similarity(torch.cat([each[:-1] for each in rows]), asked[None].float()).numpy()


def load(folder: Path, **options: object) -> Engine:
    return Engine(folder, dtype="float32", device="cpu", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("newer", [False, True], ids=["v3", "v3.5"])
def test_the_documents_of_a_query_are_one_text(newer, backend, tmp_path, record_property):
    folder = write(tmp_path / "model", newer=newer)
    reference = Reference(folder, newer=newer)
    expected = reference.scores(QUERY, DOCUMENTS)
    with load(folder, backend=backend) as engine:
        assert (engine.tasks, engine.spec.score_type) == ({"score"}, "listwise")
        output = engine.score(QUERY, DOCUMENTS)
        assert output.method == "listwise"
        assert not output.truncated.any()
        worst = float(np.abs(output.scores - expected).max())
        record_property("error", worst)
        assert worst <= TOLERANCE
        # The score depends on the list: the same document twice, another order, a document alone.
        assert abs(output.scores[3] - output.scores[5]) > VISIBLE
        turned = engine.score(QUERY, DOCUMENTS[::-1]).scores[::-1]
        assert np.abs(turned - expected).max() > VISIBLE
        alone = engine.score(QUERY, DOCUMENTS[2]).scores
        assert np.abs(alone - reference.scores(QUERY, DOCUMENTS[2:3])).max() <= TOLERANCE
        assert abs(alone[0] - expected[2]) > VISIBLE
        best = engine.rerank(QUERY, DOCUMENTS, top_n=3)
        assert [result.index for result in best] == np.argsort(-expected, kind="stable")[:3].tolist()
    # The plausible mistakes: the prompt of the other version, and of v3.5 the query's first marker.
    assert np.abs(Reference(folder, newer=not newer).scores(QUERY, DOCUMENTS) - expected).max() > VISIBLE
    if newer:
        assert np.abs(reference.scores(QUERY, DOCUMENTS, asked=0) - expected).max() > VISIBLE


def test_many_documents_are_blocks_that_share_their_query(tmp_path, record_property):
    folder = write(tmp_path / "model", newer=False)
    documents = [f"{SENTENCES[i % 9]} {i}" for i in range(130)]
    reference = Reference(folder, newer=False)
    expected = reference.scores(QUERY, documents)
    with load(folder) as engine:
        actual = engine.score(QUERY, documents).scores
    worst = float(np.abs(actual - expected).max())
    record_property("error", worst)
    assert worst <= TOLERANCE
    blocks = np.concatenate([reference.scores(QUERY, part) for part in (documents[:125], documents[125:])])
    assert np.abs(actual - blocks).max() > VISIBLE  # each block by itself


def test_neighbours_with_one_query_are_a_list(tmp_path):
    folder = write(tmp_path / "model", newer=True)
    reference = Reference(folder, newer=True)
    queries = [QUERY, QUERY, "The wheel?", QUERY]
    expected = [
        reference.scores(*each)
        for each in ((QUERY, DOCUMENTS[:2]), ("The wheel?", DOCUMENTS[2:3]), (QUERY, DOCUMENTS[3:4]))
    ]
    with load(folder) as engine:
        actual = engine.score(queries, DOCUMENTS[:4]).scores
        assert np.abs(actual - np.concatenate(expected)).max() <= TOLERANCE
        told = reference.scores(QUERY, DOCUMENTS, instruction="Prefer ponds.")
        output = engine.score(QUERY, DOCUMENTS, instruction="Prefer ponds.")
        assert np.abs(output.scores - told).max() <= TOLERANCE
        # A marker in a text would be one more document, or another query.
        marked = engine.score(QUERY + MARKERS[1], [document + MARKERS[0] for document in DOCUMENTS]).scores
        assert np.abs(marked - reference.scores(QUERY, DOCUMENTS)).max() <= TOLERANCE


def test_over_long_documents_are_cut(tmp_path):
    folder = write(tmp_path / "model", newer=False)
    reference = Reference(folder, newer=False)
    long = "deep water " * 1500
    ids = reference.tokenizer(long, add_special_tokens=False)["input_ids"]
    assert len(ids) > 2048
    documents = [DOCUMENTS[0], reference.tokenizer.decode(ids[:2048]), DOCUMENTS[3]]
    with load(folder) as engine:
        output = engine.score(QUERY, [DOCUMENTS[0], long, DOCUMENTS[3]])
        assert output.truncated.tolist() == [False, True, False]
        assert np.abs(output.scores - reference.scores(QUERY, documents)).max() <= TOLERANCE
        with pytest.raises(InputTooLongError, match=f"the document at index 1 has {len(ids)} tokens.*2048"):
            engine.score(QUERY, ["a", long], truncate="error")
        start = engine.score(QUERY, ["a", long], truncate="start").scores
        assert np.abs(start - engine.score(QUERY, ["a", long]).scores).max() > 0
    least = len(reference.tokenizer(prompt(QUERY, ["a"], newer=False))["input_ids"])
    with load(folder, max_length=least + 20) as engine:  # each document is a block
        short = engine.score(QUERY, DOCUMENTS[3:4] * 3).scores
        assert np.abs(short - reference.scores(QUERY, DOCUMENTS[3:4])).max() <= TOLERANCE
    with (
        load(folder, max_length=least // 2) as engine,
        pytest.raises(InputTooLongError, match="leaves 0 for the query"),
    ):
        engine.score(QUERY, DOCUMENTS)


def test_what_a_list_has_no_place_for_is_refused(tmp_path):
    folder = write(tmp_path / "model", newer=False)
    with load(folder) as engine:
        with pytest.raises(InvalidRequestError, match="activation='sigmoid' means nothing to the scores of a list"):
            engine.score(QUERY, DOCUMENTS, activation="sigmoid")
        with pytest.raises(
            InvalidRequestError, match=r"^budget_ms=50: .* is a listwise reranker, .*leave budget_ms out"
        ):
            engine.rerank(QUERY, DOCUMENTS, budget_ms=50)
        with pytest.raises(UnsupportedTaskError, match="serves score, not embed"):
            engine.score(QUERY, DOCUMENTS, method="cosine")
        assert len(engine.rerank(QUERY, [])) == 0
    with pytest.raises(ModelLoadError, match="ranks a list of documents and nothing else; leave convert='embed' out"):
        load(folder, convert="embed")
