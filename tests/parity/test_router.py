"""A Router sends queries and documents to models of their own, as sentence-transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny.heads import write_splade
from tests.tiny.tokenizers import SENTENCES

from millpond import Engine, InvalidRequestError, ModelLoadError

pytestmark = [pytest.mark.torch, pytest.mark.contract]

TEXTS = [*SENTENCES[:6], "", "mill mill [SEP] 😀"]
_Rows = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def inference_free(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SPLADE whose queries are weights of their tokens."""
    import torch
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Router
    from sentence_transformers.sparse_encoder.modules import SparseStaticEmbedding, SpladePooling

    root = tmp_path_factory.mktemp("router")
    masked = SparseEncoder(str(write_splade(root / "splade")), device="cpu")[0]
    weight = torch.arange(len(masked.tokenizer.get_vocab())).float() / 7 - 1  # a weight may be 0 or negative
    query = SparseStaticEmbedding(masked.tokenizer, weight=weight, frozen=True)
    document = [masked, SpladePooling("max", activation_function="log1p_relu")]
    SparseEncoder(modules=[Router.for_query_document([query], document)], device="cpu").save(str(root / "routed"))
    return root / "routed"


def _by_reference(folder: Path) -> tuple[_Rows, _Rows]:
    from sentence_transformers import SparseEncoder

    model = SparseEncoder(str(folder), device="cpu")
    return model.encode_query(TEXTS).to_dense().numpy(), model.encode_document(TEXTS).to_dense().numpy()


def _sparse(engine: Engine, width: int, *, texts: list[str] = TEXTS, **options: Any) -> _Rows:
    rows = np.zeros((len(TEXTS), width), dtype=np.float32)
    for row, weights in zip(rows, engine.sparse_embed(texts, **options), strict=True):
        row[list(weights)] = list(weights.values())
    return rows


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_inference_free_splade(inference_free: Path, backend: str) -> None:
    queries, documents = _by_reference(inference_free)
    width = queries.shape[1]
    with Engine(inference_free, backend=backend, device="cpu", dtype="float32") as engine:
        assert np.abs(_sparse(engine, width, role="query") - queries).max() < 1e-5
        assert np.abs(_sparse(engine, width, role="document") - documents).max() < 1e-5
        assert np.abs(_sparse(engine, width) - documents).max() < 1e-5
        special = _sparse(engine, width, texts=[f"[CLS] {text}" for text in TEXTS], role="query")
    # Negative controls: the other route, weights forgotten, special tokens kept, one logarithm less.
    wrong = (documents, (queries != 0).astype(np.float32), special)
    assert all(np.abs(rows - queries).max() > 0.1 for rows in wrong)
    assert np.abs(np.expm1(documents) - documents).max() > 0.1


def test_weights_in_a_json_file(inference_free: Path, tmp_path: Path) -> None:
    import shutil

    folder = shutil.copytree(inference_free, tmp_path / "idf")
    query = folder / "query_0_SparseStaticEmbedding"
    (query / "model.safetensors").unlink()
    vocabulary = json.loads((query / "tokenizer.json").read_text())["model"]["vocab"]
    idf = {token: number / 3 for token, number in vocabulary.items() if number % 2}
    (query / "idf.json").write_text(json.dumps(idf))
    (query / "config.json").write_text(json.dumps({"path": str(query / "idf.json"), "frozen": True}))
    queries, _ = _by_reference(folder)
    with Engine(folder, device="cpu") as engine:
        assert np.abs(_sparse(engine, queries.shape[1], role="query") - queries).max() < 1e-5
    (query / "idf.json").unlink()
    with pytest.raises(ModelLoadError, match=r"idf\.json"):
        Engine(folder)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_vectors_of_two_models(tmp_path: Path, backend: str) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Router, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding

    backbone = Transformer(str(write_splade(tmp_path / "plain")))
    width = backbone.get_embedding_dimension()
    query = StaticEmbedding(backbone.tokenizer, embedding_dim=width)
    router = Router.for_query_document([query], [backbone, Pooling(width, "mean")])
    folder = tmp_path / "routed"
    SentenceTransformer(modules=[router, Normalize()], device="cpu").save(str(folder))
    reference = SentenceTransformer(str(folder), device="cpu")
    queries, documents = reference.encode_query(TEXTS), reference.encode_document(TEXTS)
    with Engine(folder, backend=backend, device="cpu", dtype="float32", cache=tmp_path / "cache.db") as engine:
        for _ in range(2):  # the second time from the cache
            found = [np.asarray(engine.embed(TEXTS, role=role)) for role in ("query", "document")]
            assert np.abs(found[0] - queries).max() < 1e-5
            assert np.abs(found[1] - documents).max() < 1e-5
        assert np.abs(queries - documents).max() > 0.1
        scores = np.asarray(engine.score(TEXTS[:6], TEXTS[:6])).ravel()
        assert np.abs(scores - (queries * documents).sum(axis=1)[:6]).max() < 1e-5


def test_routes_that_are_not_described_are_refused(inference_free: Path, tmp_path: Path) -> None:
    import shutil

    folder = shutil.copytree(inference_free, tmp_path / "wrong")
    config = json.loads((folder / "router_config.json").read_text())
    config["parameters"]["route_mappings"] = {"('query', None)": "nowhere"}
    (folder / "router_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="nowhere"):
        Engine(folder)


def test_a_role_without_a_route_is_refused(inference_free: Path, tmp_path: Path) -> None:
    import shutil

    folder = shutil.copytree(inference_free, tmp_path / "one")
    config = json.loads((folder / "router_config.json").read_text())
    del config["structure"]["query"]
    (folder / "router_config.json").write_text(json.dumps(config))
    with Engine(folder, device="cpu") as engine:
        assert len(engine.sparse_embed(TEXTS, role="document")) == len(TEXTS)
        with pytest.raises(InvalidRequestError, match="no such route"):
            engine.sparse_embed(TEXTS, role="query")
