"""The options of FastEmbedSparse are translated, or refused with the line to write instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millpond.compat.fastembed_options import translate_sparse_options
from millpond.errors import InvalidRequestError

OWN = {"model", "model_name", "device", "dtype", "max_length", "truncate", "show_progress"}


def translated(**options: Any) -> dict[str, Any]:
    return translate_sparse_options(options, own=OWN)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"batch_size": 256, "threads": 4, "parallel": 0, "lazy_load": True}, {}),
        ({"threads": None, "providers": None, "parallel": None, "cache_dir": None}, {}),
        ({"providers": ["CPUExecutionProvider"]}, {"device": "cpu"}),
        ({"providers": ["CUDAExecutionProvider", "CPUExecutionProvider"]}, {"device": "cuda"}),
        ({"providers": [("CUDAExecutionProvider", {"device_id": 0})]}, {"device": "cuda"}),
        ({"cuda": False}, {}),
        ({"cuda": True}, {"device": "cuda"}),
        ({"cuda": True, "device_ids": [0, 1]}, {"device": "cuda:0,cuda:1"}),
        ({"device": None, "truncate": "start"}, {"device": "auto", "truncate": "start"}),
        ({"top_k": 7}, {"top_k": 7}),  # unknown: for the adapter to refuse
    ],
    ids=["none", "hints", "nulls", "cpu", "cuda", "provider options", "no cuda", "yes cuda", "ids", "own", "unknown"],
)
def test_what_has_an_equal_meaning_is_translated(options: dict[str, Any], expected: dict[str, Any]) -> None:
    assert translated(model_name="naver/splade-v3", **options) == {"model_name": "naver/splade-v3", **expected}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"providers": ["TensorrtExecutionProvider"]}, 'providers=.*write device="cpu" or device="cuda"'),
        ({"providers": []}, "providers=.*ONNX"),
        ({"providers": "OpenVINOExecutionProvider"}, "providers=.*ONNX"),
        ({"providers": [7]}, "providers=.*ONNX"),
        ({"cuda": "yes"}, "cuda='yes' must be True or False"),
        ({"cuda": True, "device": "cpu"}, "contradict each other"),
        ({"specific_model_path": "/models"}, "specific_model_path='/models'.*pass a folder"),
        ({"max_active_dims": 64}, "max_active_dims=64.*leave it out"),
        ({"batch_size": 0}, "batch_size=0 must be a positive int"),
        ({"cache_dir": "/elsewhere"}, "HF_HUB_CACHE=/elsewhere"),
    ],
    ids=["tensorrt", "empty", "name", "number", "flag", "both", "path", "pruning", "batch", "cache"],
)
def test_what_would_change_vectors_is_refused_with_the_line_to_write(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        translated(model_name="naver/splade-v3", **options)


@pytest.mark.parametrize("name", ["Qdrant/bm25", "qdrant/BM25", "Qdrant/bm42-all-minilm-l6-v2-attentions"])
@pytest.mark.parametrize("option", ["model", "model_name"])
def test_a_model_that_counts_words_stays_with_fastembed(option: str, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"{name} counts words.*keep FastEmbedSparse"):
        translated(**{option: name})


def test_a_folder_needs_no_place_of_the_hubs_files(tmp_path: Path) -> None:
    assert translated(model_name=str(tmp_path), cache_dir="/elsewhere") == {"model_name": str(tmp_path)}
