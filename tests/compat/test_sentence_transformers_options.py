"""The options of sentence-transformers and of the classes over it: translated, accepted, or refused with a way out."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from millpond.compat.sentence_transformers_options import (
    hide_secrets,
    translate_embedding_options,
    translate_scoring_options,
)
from millpond.errors import InvalidRequestError

OWN = frozenset(
    "model model_name revision device dtype max_length hf_overrides normalize dimensions query_prompt document_prompt "
    "query_prompt_name document_prompt_name trust_remote_code show_progress truncate activation".split()
)


def embedding(**options: Any) -> dict[str, Any]:
    return translate_embedding_options(options, own=OWN, replaced="HuggingFaceEmbeddings")


def llama_index(**options: Any) -> dict[str, Any]:
    return translate_embedding_options(options, own=OWN, replaced="HuggingFaceEmbedding")


def scoring(**options: Any) -> dict[str, Any]:
    return translate_scoring_options(options, own=OWN)


EQUAL: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"model_name_or_path": "a"}, {"model": "a"}),
    ({"device": None}, {"device": "auto"}),
    ({"device": "cpu"}, {"device": "cpu"}),
    ({"device": ["cuda:0", "cuda:1"]}, {"device": "cuda:0,cuda:1"}),
    ({"device": ("cpu", "cpu")}, {"device": "cpu"}),
    ({"device": torch.device("cuda:1")}, {"device": "cuda:1"}),
    ({"dtype": torch.float16}, {"dtype": "float16"}),
    ({"dtype": None}, {}),
    ({"model_kwargs": {"device": "cpu", "revision": "v1"}}, {"device": "cpu", "revision": "v1"}),
    ({"model_kwargs": {"device": None, "revision": None, "prompts": None}}, {}),
    ({"model_kwargs": None, "encode_kwargs": None, "query_encode_kwargs": None, "cache_folder": None}, {}),
    ({"model_kwargs": {"device": torch.device("cpu")}}, {"device": "cpu"}),
    (
        {"model_kwargs": {"truncate_dim": 64}, "encode_kwargs": {"normalize_embeddings": True}},
        {"dimensions": 64, "normalize": True},
    ),
    ({"model_kwargs": {"model_kwargs": {"torch_dtype": torch.bfloat16}}}, {"dtype": "bfloat16"}),
    ({"model_kwargs": {"model_kwargs": {"dtype": "float16", "attn_implementation": "sdpa"}}}, {"dtype": "float16"}),
    ({"model_kwargs": {"torch_dtype": "half"}}, {"dtype": "float16"}),
    ({"model_kwargs": {"torch_dtype": "auto"}}, {}),
    ({"model_kwargs": {"model_kwargs": {"device_map": "auto"}}}, {}),
    ({"model_kwargs": {"model_kwargs": {"device_map": "cuda:1"}}}, {"device": "cuda:1"}),
    ({"model_kwargs": {"model_kwargs": {"device_map": {"": 0}}}}, {"device": "cuda:0"}),
    ({"model_kwargs": {"tokenizer_kwargs": {"model_max_length": 128, "padding_side": "left"}}}, {"max_length": 128}),
    ({"model_kwargs": {"processor_kwargs": {"truncation_side": "left"}}}, {"truncate": "start"}),
    (
        {"model_kwargs": {"config_kwargs": {"rope_theta": 1e6, "unpad_inputs": True}}},
        {"hf_overrides": {"rope_theta": 1e6}},
    ),
    ({"model_kwargs": {"trust_remote_code": True, "backend": "torch", "similarity_fn_name": "dot"}}, {}),
    ({"model_kwargs": {"backend": "ipex", "local_files_only": False, "token": True}}, {}),
    ({"trust_remote_code": True}, {}),
    ({"trust_remote_code": False}, {"trust_remote_code": False}),
    ({"encode_kwargs": {"normalize_embeddings": True}}, {"normalize": True}),
    ({"encode_kwargs": {"normalize_embeddings": False}}, {}),
    ({"encode_kwargs": {"batch_size": 32, "show_progress_bar": True}}, {"show_progress": True}),
    ({"encode_kwargs": {"convert_to_numpy": True, "precision": "float32", "output_value": "sentence_embedding"}}, {}),
    ({"encode_kwargs": {"device": "cpu"}, "model_kwargs": {"device": "cpu"}}, {"device": "cpu"}),
    ({"encode_kwargs": {"prompt": "p: "}}, {"document_prompt": "p: ", "query_prompt": "p: "}),
    (
        {"encode_kwargs": {"prompt_name": "passage"}, "query_encode_kwargs": {"prompt_name": "query"}},
        {"document_prompt_name": "passage", "query_prompt_name": "query"},
    ),
    # query_encode_kwargs replaces encode_kwargs: a side without a prompt gets what encode() gives it.
    (
        {"encode_kwargs": {"prompt": "d: "}, "query_encode_kwargs": {"batch_size": 1}},
        {"document_prompt": "d: ", "query_prompt_name": ""},
    ),
    ({"query_encode_kwargs": {"prompt": "q: "}}, {"query_prompt": "q: ", "document_prompt_name": ""}),
    (
        {"model_kwargs": {"prompts": {"ask": "q: "}}, "query_encode_kwargs": {"prompt_name": "ask"}},
        {"query_prompt": "q: ", "document_prompt_name": ""},
    ),
    (
        {"model_kwargs": {"prompts": {"ask": "q: "}, "default_prompt_name": "ask"}},
        {"query_prompt": "q: ", "document_prompt": "q: "},
    ),
    ({"model_kwargs": {"default_prompt_name": "x"}}, {"query_prompt_name": "x", "document_prompt_name": "x"}),
    ({"query_instruction": "q: "}, {"query_prompt": "q: ", "document_prompt": ""}),
    ({"query_instruction": "", "embed_instruction": "d: "}, {"query_prompt": "", "document_prompt": "d: "}),
    ({"query_instruction": "q: ", "text_instruction": "d: "}, {"query_prompt": "q: ", "document_prompt": "d: "}),
    ({"text_instruction": "d: ", "query_instruction": None}, {"document_prompt": "d: "}),
    ({"encode_kwargs": {"task": "retrieval.passage"}, "query_encode_kwargs": {"task": "retrieval.query"}}, {}),
    ({"multi_process": True, "show_progress_bar": True}, {"show_progress": True}),
    ({"multi_process": True, "encode_kwargs": {"batch_size": 8}}, {}),
    (
        {"parallel_process": True, "target_devices": ["cuda:0", "cuda:1"], "device": "cuda:0"},
        {"device": "cuda:0,cuda:1"},
    ),
    ({"parallel_process": True, "target_devices": ["cpu"] * 4}, {"device": "cpu"}),
    ({"parallel_process": False, "target_devices": ["cuda:0"]}, {}),
    ({"parallel_process": True}, {}),
    ({"batch_size": 16, "embed_batch_size": 10, "max_seq_length": 64}, {"max_length": 64}),
    ({"backend": "torch", "normalize_embeddings": True}, {"normalize": True}),
    ({"nobody": 1, "knows": None}, {"nobody": 1, "knows": None}),
    ({"normalize": None, "encode_kwargs": {"normalize_embeddings": True}}, {"normalize": True}),
]


def names(cases: list[tuple[dict[str, Any], Any]]) -> list[str]:
    return [f"{number}-{next(iter(options), 'nothing')}" for number, (options, _) in enumerate(cases)]


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.mark.parametrize(("options", "expected"), EQUAL, ids=names(EQUAL))
def test_what_has_an_equal_meaning_is_translated(options: dict[str, Any], expected: dict[str, Any]) -> None:
    before = copy.deepcopy(options)
    assert embedding(**options) == expected
    assert options == before  # the caller's dicts are not changed


SCORING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"model_kwargs": {"device": "cpu", "max_length": 256}}, {"device": "cpu", "max_length": 256}),
    ({"cross_encoder_kwargs": {"num_labels": 1, "model_kwargs": {"dtype": "float32"}}}, {"dtype": "float32"}),
    ({"model_kwargs": {"activation_fn": torch.nn.Sigmoid()}}, {"activation": "sigmoid"}),
    ({"model_kwargs": {"activation_fn": torch.nn.Identity}}, {"activation": "identity"}),
    ({"default_activation_function": "torch.nn.modules.activation.Softmax"}, {"activation": "softmax"}),
    ({"model_kwargs": {"automodel_args": {"torch_dtype": "float16"}}}, {"dtype": "float16"}),
    ({"model_kwargs": {"trust_remote_code": True, "tokenizer_args": {"model_max_length": 9}}}, {"max_length": 9}),
    ({"trust_remote_code": True, "batch_size": 4, "show_progress_bar": False}, {"show_progress": False}),
    ({"encode_kwargs": {}}, {"encode_kwargs": {}}),  # no option of a cross-encoder: the adapter refuses it
]


@pytest.mark.parametrize(("options", "expected"), SCORING, ids=names(SCORING))
def test_the_options_of_cross_encoders_are_translated(options: dict[str, Any], expected: dict[str, Any]) -> None:
    assert scoring(**options) == expected


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"backend": "onnx"}, "backend='onnx' is not available.*leave it out, and write dtype=\"bfloat16\""),
    ({"model_kwargs": {"backend": "openvino"}}, r"model_kwargs\['backend'\]='openvino'"),
    ({"model_kwargs": {"token": "hf_secret"}}, r"model_kwargs\['token'\] is not an option here.*HF_TOKEN"),
    ({"model_kwargs": {"token": False}}, "HF_HUB_DISABLE_IMPLICIT_TOKEN=1"),
    ({"token": "hf_secret"}, "^token is not an option here.*HF_TOKEN"),
    ({"cache_folder": "/models"}, "set HF_HUB_CACHE=/models before Python starts"),
    ({"model_kwargs": {"cache_folder": "/models"}}, "HF_HUB_CACHE=/models"),
    ({"model_kwargs": {"local_files_only": True}}, "set HF_HUB_OFFLINE=1"),
    ({"model_kwargs": {"model_kwargs": {"torch_dtype": "float64"}}}, 'write dtype="float32" instead'),
    ({"model_kwargs": {"model_kwargs": {"load_in_8bit": True}}}, 'write quantization="int8" instead'),
    ({"model_kwargs": {"model_kwargs": {"quantization_config": object()}}}, 'write quantization="int8" instead'),
    ({"model_kwargs": {"model_kwargs": {"device_map": {"encoder": 0}}}}, r'write device=\["cuda:0", "cuda:1"\]'),
    ({"model_kwargs": {"model_kwargs": {"low_rank": 3}}}, r"model_kwargs\['model_kwargs'\]\['low_rank'\] is unknown"),
    ({"model_kwargs": {"modules": []}}, "pass the folder as model= instead"),
    ({"model_kwargs": {"frobnicate": 1}}, r"model_kwargs\['frobnicate'\] is unknown.*leave it out"),
    ({"model_kwargs": {"tokenizer_kwargs": {"do_lower_case": True}}}, "'do_lower_case'.* is unknown"),
    ({"model_kwargs": {"tokenizer_kwargs": {"truncation": False}}}, 'write truncate="error" instead'),
    ({"model_kwargs": ["device"]}, "must be a dict of options"),
    ({"model_kwargs": {1: 2}}, "must be a dict of options"),
    ({"model_kwargs": {"prompts": {"query": "q: "}}}, "never applied.*Write query_prompt='q: ', document_prompt=''"),
    ({"model_kwargs": {"prompts": {"query": "", "passage": ""}}}, "Write query_prompt='', document_prompt=''"),
    ({"model_kwargs": {"prompts": {"query": 3}}}, "must map names to texts"),
    ({"encode_kwargs": {"precision": "int8"}}, 'output_dtype="int8"'),
    ({"encode_kwargs": {"output_value": "token_embeddings"}}, "token_embed"),
    ({"encode_kwargs": {"frobnicate": 1}}, r"encode_kwargs\['frobnicate'\] is unknown"),
    ({"encode_kwargs": {"batch_size": 0}}, "must be a positive int"),
    ({"encode_kwargs": {"batch_size": True}}, "must be a positive int"),
    ({"encode_kwargs": {"normalize_embeddings": "yes"}}, "must be True or False"),
    ({"encode_kwargs": {"prompt": 3}}, "write document_prompt= instead"),
    ({"encode_kwargs": {"task": "text-matching"}}, r"embed\(texts, adapter=...\)"),
    ({"encode_kwargs": {"task": "retrieval.passage"}}, "for queries"),
    ({"multi_process": True, "encode_kwargs": {"normalize_embeddings": True}}, "was ignored.*multi_process"),
    ({"multi_process": True, "encode_kwargs": {"prompt_name": "query"}}, "was ignored.*multi_process"),
    ({"normalize": False, "encode_kwargs": {"normalize_embeddings": True}}, "normalize=False and .* contradict"),
    ({"device": "cpu", "model_kwargs": {"device": "cuda"}}, "contradict each other"),
    ({"query_prompt": "a", "query_instruction": "b"}, "query_prompt='a' and query_instruction='b' contradict"),
    ({"query_prompt": "a", "encode_kwargs": {"prompt_name": "b"}}, "query_prompt='a' and query_prompt_name='b'"),
    ({"encode_kwargs": {"truncate_dim": 8}, "query_encode_kwargs": {"truncate_dim": 9}}, "contradict"),
    ({"query_instruction": 7}, "write query_prompt= instead"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=names(REFUSED))
def test_what_would_change_vectors_is_refused_with_the_line_to_write(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        embedding(**options)
    assert "hf_secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_kwargs": {"num_labels": 2}}, "a reranker has one score"),
        ({"model_kwargs": {"activation_fn": torch.nn.Tanh()}}, 'activation="sigmoid"'),
        ({"model_kwargs": {"prompts": {"query": "q"}}}, 'write instruction="..." instead'),
        ({"cross_encoder_kwargs": {"backend": "onnx"}}, r"cross_encoder_kwargs\['backend'\]"),
    ],
    ids=["num_labels", "activation", "prompts", "backend"],
)
def test_what_would_change_scores_is_refused_with_the_line_to_write(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        scoring(**options)


def test_a_name_without_an_owner_gets_the_one_that_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert embedding(model="all-MiniLM-L6-v2") == {"model": "sentence-transformers/all-MiniLM-L6-v2"}
    assert llama_index(model_name="LaBSE") == {"model_name": "sentence-transformers/LaBSE"}
    assert scoring(model="ms-marco-MiniLM-L6-v2") == {"model": "cross-encoder/ms-marco-MiniLM-L6-v2"}
    for name in ("bert-base-uncased", "owner/all-MiniLM-L6-v2", "./all-MiniLM-L6-v2", "", None):
        assert embedding(model=name) == {"model": name}
    (tmp_path / "all-MiniLM-L6-v2").mkdir()
    assert embedding(model="all-MiniLM-L6-v2") == {"model": "all-MiniLM-L6-v2"}  # a folder


def test_a_folder_needs_no_hub(tmp_path: Path) -> None:
    passed = {"cache_folder": "/models", "model_kwargs": {"local_files_only": True, "revision": "main"}}
    assert embedding(model=str(tmp_path), **passed) == {"model": str(tmp_path)}
    assert embedding(model_name=tmp_path, **passed) == {"model_name": tmp_path}


def test_the_cache_of_the_environment_is_accepted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert embedding(cache_folder=str(tmp_path)) == embedding(cache_folder=tmp_path) == {}
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.delenv("HUGGINGFACE_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert embedding(cache_folder=str(tmp_path / "hub")) == {}
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert embedding(model_kwargs={"local_files_only": True}) == {}


def test_an_own_option_is_the_adapters() -> None:
    own = OWN | {"embed_batch_size", "show_progress_bar"}
    passed = {"embed_batch_size": -1, "show_progress_bar": "x", "dimensions": "y"}
    assert translate_embedding_options(passed, own=own, replaced="HuggingFaceEmbedding") == passed
    # An adapter without a progress bar ignores one.
    assert translate_embedding_options({"show_progress": True}, own=(), replaced="HuggingFaceEmbedding") == {}


def test_an_empty_instruction_of_llama_index_was_not_empty() -> None:
    assert llama_index(model_name="owner/name", query_instruction="") == {
        "model_name": "owner/name",
        "query_prompt": "",
        "document_prompt": "",
    }
    with pytest.raises(InvalidRequestError, match='query_prompt="Represent this question'):
        llama_index(model_name="BAAI/bge-base-en-v1.5", query_instruction="")


def test_queries_that_were_not_normalized_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    passed = {"encode_kwargs": {"normalize_embeddings": True}, "query_encode_kwargs": {"batch_size": 1}}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert embedding(**passed) == {"normalize": True}
        assert embedding(model_kwargs={"truncate_dim": 8}) == {"dimensions": 8}
        assert embedding(model_kwargs={"truncate_dim": 8}, encode_kwargs={"normalize_embeddings": True}) == {
            "dimensions": 8,
            "normalize": True,
        }
    told = [record.message for record in caplog.records]
    assert len([line for line in told if "query_encode_kwargs replaces" in line]) == 1
    assert len([line for line in told if "truncate_dim without" in line]) == 1


def test_secrets_are_hidden_at_every_depth() -> None:
    passed = {
        "token": "s1",
        "model": "a",
        "model_kwargs": {"token": "s2", "model_kwargs": {"token": "s3"}, "device": "cpu"},
    }
    hidden = hide_secrets(passed)
    assert not any(secret in str(hidden) for secret in ("s1", "s2", "s3"))
    assert (hidden["model"], hidden["model_kwargs"]["device"]) == ("a", "cpu")
    assert passed["token"] == "s1"


def test_the_import_costs_neither_torch_nor_pydantic() -> None:
    program = "import sys, millpond.compat.sentence_transformers_options; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "millpond.compat.sentence_transformers_options" in modules
    assert not {"torch", "pydantic", "transformers"} & set(modules)
