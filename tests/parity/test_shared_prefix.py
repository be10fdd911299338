"""Computing the common prefix of a query's pairs once gives the same scores as computing it for each pair."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.tiny import SENTENCES, write_checkpoint

from millpond import Engine
from millpond.attention import dense, flex, matmul_attention, sdpa, varlen
from millpond.attention.kernels import select
from millpond.attention.segments import Segments
from millpond.attention.signature import Masking
from millpond.engine.execute.batch import DeviceBatch
from millpond.engine.schedule import intake

pytestmark = pytest.mark.contract  # two engines for each case, one of them a peer's

FAMILIES = ("qwen3", "qwen2-sliding", "gemma2", "mistral-sliding", "gpt2")
TEMPLATE = (
    "Judge whether the document answers the query, and say yes or no.\n<Query>: {{ messages[0].content }}\n"
    "<Document>: {{ messages[1].content }}\nAnswer:"
)
QUERY = "How much water does one sack of wheat need?"
DOCUMENTS = (*SENTENCES, "a", "", SENTENCES[3], SENTENCES[0] + " " + SENTENCES[1])


@pytest.fixture(scope="module")
def rerankers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Engine]]:
    root = tmp_path_factory.mktemp("shared")
    engines: dict[str, Engine] = {}

    def reranker(family: str) -> Engine:
        if family not in engines:
            folder = _classifier(root / family, family)
            engines[family] = Engine(folder, dtype="float32", device="cpu", score_template=TEMPLATE)
        return engines[family]

    yield reranker
    for engine in engines.values():
        engine.close()


def _classifier(folder: Path, family: str) -> Path:
    """A language model with a score head of one label, in transformers' layout."""
    from safetensors.torch import load_file, save_file

    write_checkpoint(folder, family, config={"max_position_embeddings": 256, "n_positions": 256}, tokenizer_limit=None)
    config = json.loads((folder / "config.json").read_text())
    name = config["architectures"][0].removesuffix("Model") + "ForSequenceClassification"
    config |= {"architectures": [name], "id2label": {"0": "relevant"}}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    width = config.get("hidden_size", config.get("n_embd"))
    tensors["score.weight"] = torch.randn(1, width, generator=torch.Generator().manual_seed(5))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_those_of_pairs_computed_whole(family, rerankers, monkeypatch):
    engine = rerankers(family)
    packed: list[DeviceBatch] = []
    pack = DeviceBatch.pack.__func__

    def recording(cls, *args, **options):
        packed.append(pack(cls, *args, **options))
        return packed[-1]

    monkeypatch.setattr(DeviceBatch, "pack", classmethod(recording))
    shared = engine.score(QUERY, DOCUMENTS, activation=False).scores
    assert any(batch.lead for batch in packed)
    tokens = sum(batch.segments.total for batch in packed)
    monkeypatch.setattr(intake, "shared_prefixes", lambda items, tokenized: {})
    packed.clear()
    whole = engine.score(QUERY, DOCUMENTS, activation=False).scores
    assert not any(batch.lead for batch in packed)
    assert tokens < 0.7 * sum(batch.segments.total for batch in packed)
    alone = np.concatenate([engine.score(QUERY, document, activation=False).scores for document in DOCUMENTS])
    for expected in (whole, alone):
        assert np.abs(shared - expected).max() <= 1e-5 * np.abs(expected).max()
    assert np.ptp(whole) > 0.1 * np.abs(whole).max()


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_the_same_in_padded_batches(family, rerankers, monkeypatch):
    """What the reference kernel does on CUDA, where no other kernel takes shared prefixes."""
    engine = rerankers(family)
    expected = engine.score(QUERY, DOCUMENTS, activation=False).scores
    shared = []

    def padded(query, key, value, segments, masking):
        shared.append(segments.shared)
        return sdpa.attend_padded(query, key, value, segments, masking)

    monkeypatch.setattr(matmul_attention, "fits", lambda *call: False)
    monkeypatch.setattr(sdpa, "attend", padded)
    scores = engine.score(QUERY, DOCUMENTS, activation=False).scores
    assert any(shared)
    assert np.abs(scores - expected).max() <= 1e-5 * np.abs(expected).max()


def test_a_prefix_left_out_or_of_another_query_is_noticed(rerankers, monkeypatch):
    engine = rerankers("qwen3")
    expected = engine.score(QUERY, DOCUMENTS, activation=False).scores
    run = dense._continued

    def forgotten(states, prefix, own):
        return run(states, (prefix[0] + 1, prefix[1] + 1), own)

    monkeypatch.setattr(dense, "_continued", forgotten)
    wrong = engine.score(QUERY, DOCUMENTS, activation=False).scores
    assert np.abs(wrong - expected).max() > 1e-3 * np.abs(expected).max()


def test_queries_share_with_their_own_documents_only(rerankers):
    engine = rerankers("qwen3")
    queries = [SENTENCES[i % 3] for i in range(12)]
    together = engine.score(queries, list(SENTENCES[:12]), activation=False).scores
    alone = [engine.score(q, d, activation=False).scores[0] for q, d in zip(queries, SENTENCES[:12], strict=True)]
    assert np.abs(together - alone).max() <= 1e-5 * np.abs(together).max()


@pytest.mark.parametrize("window", [None, 3, 7, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_attention_over_a_shared_prefix(softcap, window):
    generator = torch.Generator().manual_seed(1)
    masking = Masking(scale=0.5, causal=True, window=window, softcap=softcap)
    prefix, own = 6, (1, 4, 4, 9)
    states = [torch.randn(prefix + sum(own), heads, 8, generator=generator) for heads in (4, 2, 2)]
    segments = Segments.of((prefix, *own), prefixes=(-1, 0, 0, 0, 0))
    out = sdpa.attend(*states, segments, masking)
    start = prefix
    for length in own:
        rows = [torch.cat((part[:prefix], part[start : start + length])) for part in states]
        alone = sdpa.attend(*rows, Segments.of((prefix + length,)), replace(masking))
        torch.testing.assert_close(out[start : start + length], alone[prefix:], atol=1e-5, rtol=1e-5)
        start += length


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_no_kernel_that_knows_no_prefixes_is_chosen(dtype, softcap, window, monkeypatch):
    """On a GPU too, which this machine may not have: the table reads device, dtype and shape of the query."""
    monkeypatch.setattr(varlen, "parameters", lambda: frozenset({"scale", "window_size", "enable_gqa", "seqused_k"}))
    masking = Masking(scale=0.25, causal=True, window=window, softcap=softcap)
    lengths = (6, 4, 4, 9)
    states = [torch.zeros(sum(lengths), heads, 16, dtype=dtype) for heads in (4, 2, 2)]
    on_cuda = SimpleNamespace(device=torch.device("cuda"), dtype=dtype, shape=states[0].shape)
    for query in (states[0], on_cuda):
        assert select(query, *states[1:], Segments.of(lengths, prefixes=(-1, 0, 0, 0)), masking) not in (varlen, flex)
    if softcap or dtype != torch.float32:
        assert select(on_cuda, *states[1:], Segments.of(lengths), masking) in (varlen, flex)  # without prefixes
