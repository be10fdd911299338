"""The options of the classes that adapters replace: translated, accepted, or refused with the page that says more."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from millpond.compat.replaced_options import hide_secrets, translate_options
from millpond.errors import InvalidRequestError

OWN = frozenset(
    "model model_name revision device dtype max_length hf_overrides normalize dimensions query_prompt document_prompt "
    "query_prompt_name document_prompt_name trust_remote_code show_progress truncate activation".split()
)
GUIDE = "is not available here; leave it out, or write what docs/migrate/index.md says instead"


def embedding(**options: Any) -> dict[str, Any]:
    return translate_options(options, own=OWN, kind="embedding", replaced="HuggingFaceEmbeddings")


def llama_index(**options: Any) -> dict[str, Any]:
    return translate_options(options, own=OWN, kind="embedding", replaced="HuggingFaceEmbedding")


def scoring(**options: Any) -> dict[str, Any]:
    return translate_options(options, own=OWN, kind="scoring")


def sparse(**options: Any) -> dict[str, Any]:
    return translate_options(options, own=OWN, kind="sparse")


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"model_name_or_path": "a", "revision": "v1"}, {"model": "a", "revision": "v1"}),
        (
            {
                "model_kwargs": {
                    "device": None,
                    "model_kwargs": {"torch_dtype": torch.bfloat16},
                    "trust_remote_code": True,
                }
            },
            {"dtype": "bfloat16"},
        ),
        (
            {"model_kwargs": {"torch_dtype": "half", "device": torch.device("cuda:1")}},
            {"dtype": "float16", "device": "cuda:1"},
        ),
        (
            {"device": ["cuda:0", "cuda:1"], "model_kwargs": {"torch_dtype": "auto", "device_map": "auto"}},
            {"device": "cuda:0,cuda:1"},
        ),
        ({"model_kwargs": {"tokenizer_kwargs": {"model_max_length": 9, "padding_side": "left"}}}, {"max_length": 9}),
        ({"model_kwargs": {"processor_kwargs": {"truncation_side": "left"}}}, {"truncate": "start"}),
        (
            {"model_kwargs": {"config_kwargs": {"rope_theta": 1e6, "unpad_inputs": True}}},
            {"hf_overrides": {"rope_theta": 1e6}},
        ),
        (
            {
                "model_kwargs": {
                    "backend": "torch",
                    "token": True,
                    "local_files_only": False,
                    "similarity_fn_name": "dot",
                }
            },
            {},
        ),
        ({"model_kwargs": None, "encode_kwargs": None, "cache_folder": None}, {}),
        (
            {"model_kwargs": {"truncate_dim": 8}, "encode_kwargs": {"normalize_embeddings": True}},
            {"dimensions": 8, "normalize": True},
        ),
        (
            {"encode_kwargs": {"normalize_embeddings": False, "batch_size": 32, "show_progress_bar": True}},
            {"show_progress": True},
        ),
        ({"encode_kwargs": {"convert_to_tensor": True, "precision": "float32", "device": "cpu"}}, {"device": "cpu"}),
        ({"multi_process": True, "encode_kwargs": {"batch_size": 8}}, {}),
        (
            {"parallel_process": True, "target_devices": ["cuda:0", "cuda:1"], "device": "cuda:0"},
            {"device": "cuda:0,cuda:1"},
        ),
        ({"providers": ["CUDAExecutionProvider", "CPUExecutionProvider"], "threads": 4}, {"device": "cuda"}),
    ],
    ids=str,
)
def test_what_has_an_equal_meaning_is_translated(options: dict[str, Any], expected: dict[str, Any]) -> None:
    before = copy.deepcopy(options)
    assert embedding(**options) == expected
    assert options == before


@pytest.mark.parametrize(
    ("options", "query", "document"),
    [
        ({"encode_kwargs": {"prompt": "p: "}}, "p: ", "p: "),
        ({"encode_kwargs": {"prompt_name": "d"}, "query_encode_kwargs": {"prompt_name": "q"}}, ("q",), ("d",)),
        # query_encode_kwargs replaces encode_kwargs: a side without a prompt gets what encode() gives it.
        ({"encode_kwargs": {"prompt": "d: "}, "query_encode_kwargs": {"batch_size": 1}}, ("",), "d: "),
        ({"query_encode_kwargs": {"prompt": "q: "}}, "q: ", ("",)),
        ({"model_kwargs": {"prompts": {"x": "q: "}}, "query_encode_kwargs": {"prompt_name": "x"}}, "q: ", ("",)),
        ({"model_kwargs": {"prompts": {"x": "q: "}, "default_prompt_name": "x"}}, "q: ", "q: "),
        ({"model_kwargs": {"default_prompt_name": "x"}}, ("x",), ("x",)),
        ({"query_instruction": "q: "}, "q: ", ""),
        ({"query_instruction": "", "embed_instruction": "d: "}, "", "d: "),
        ({"text_instruction": "d: ", "query_instruction": None}, None, "d: "),
        ({"doc_embed_type": "default"}, None, ""),
    ],
    ids=str,
)
def test_prompts_are_chosen_as_encode_chooses_them(options: dict[str, Any], query: Any, document: Any) -> None:
    """A tuple holds the name of a prompt, ``None`` leaves it to the adapter."""
    expected = {}
    for role, chosen in (("query", query), ("document", document)):
        if chosen is not None:
            named = isinstance(chosen, tuple)
            expected[f"{role}_prompt_name" if named else f"{role}_prompt"] = chosen[0] if named else chosen
    assert embedding(**options) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"nobody": 1},
        {"backend": "onnx"},
        {"token": "hf_secret"},
        {"cache_folder": "/models"},
        {"model_kwargs": {"local_files_only": True}},
        {"model_kwargs": {"model_kwargs": {"load_in_8bit": True}}},
        {"model_kwargs": {"torch_dtype": "float64"}},
        {"model_kwargs": {"prompts": {"query": "q: "}}},  # encode() never applied them
        {"model_kwargs": {"device_map": {"encoder": 0}}},
        {"encode_kwargs": {"precision": "int8"}},
        {"encode_kwargs": {"output_value": "token_embeddings"}},
        {"encode_kwargs": {"task": "text-matching"}},
        {"encode_kwargs": {"normalize_embeddings": "yes"}},
        {"multi_process": True, "encode_kwargs": {"normalize_embeddings": True}},  # which was ignored
        {"providers": ["TensorrtExecutionProvider"]},
        {"doc_embed_type": "query"},
        {"query_instruction": 7},
    ],
    ids=str,
)
def test_every_other_option_is_refused_with_the_page_that_says_more(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=GUIDE):
        embedding(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"normalize": False, "encode_kwargs": {"normalize_embeddings": True}},
        {"device": "cpu", "model_kwargs": {"device": "cuda"}},
        {"query_prompt": "a", "query_instruction": "b"},
        {"query_prompt": "a", "encode_kwargs": {"prompt_name": "b"}},
        {"encode_kwargs": {"truncate_dim": 8}, "query_encode_kwargs": {"truncate_dim": 9}},
    ],
    ids=str,
)
def test_two_options_that_contradict_each_other_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="contradict each other; pass one of them"):
        embedding(**options)


def test_the_options_of_rerankers() -> None:
    crossed = {
        "max_length": 9,
        "model_kwargs": {"dtype": "float16"},
        "num_labels": 1,
        "activation_fn": torch.nn.Sigmoid(),
    }
    assert scoring(cross_encoder_kwargs=crossed) == {"max_length": 9, "dtype": "float16", "activation": "sigmoid"}
    assert scoring(automodel_args={"torch_dtype": "float32"}, use_fp16=True) == {"dtype": "float32"}
    assert scoring(model="a", tokenizer="a", use_fp16=False) == {"model": "a", "dtype": "float32"}
    for options in ({"num_labels": 2}, {"activation_fn": torch.nn.Tanh()}, {"tokenizer": "b"}, {"encode_kwargs": {}}):
        with pytest.raises(InvalidRequestError, match=GUIDE):
            scoring(model="a", **options)


def test_the_options_of_sparse_models() -> None:
    assert sparse(parallel=0, lazy_load=True, cuda=True, batch_size=256) == {"device": "cuda"}
    for options in ({"max_active_dims": 64}, {"specific_model_path": "/x"}, {"cuda": "yes"}):
        with pytest.raises(InvalidRequestError, match=GUIDE):
            sparse(**options)
    for name in ("Qdrant/bm25", "qdrant/BM25", "Qdrant/bm42-all-minilm-l6-v2-attentions"):
        with pytest.raises(InvalidRequestError, match=f"{name} counts words.*keep FastEmbedSparse"):
            sparse(model_name=name)


def test_a_name_without_an_owner_gets_the_one_that_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert embedding(model="all-MiniLM-L6-v2") == {"model": "sentence-transformers/all-MiniLM-L6-v2"}
    assert llama_index(model_name="LaBSE") == {"model_name": "sentence-transformers/LaBSE"}
    assert scoring(model="ms-marco-MiniLM-L6-v2") == {"model": "cross-encoder/ms-marco-MiniLM-L6-v2"}
    for name in ("bert-base-uncased", "owner/all-MiniLM-L6-v2", "./all-MiniLM-L6-v2", "", None):
        assert embedding(model=name) == {"model": name}
    (tmp_path / "all-MiniLM-L6-v2").mkdir()
    assert embedding(model="all-MiniLM-L6-v2") == {"model": "all-MiniLM-L6-v2"}  # a folder


def test_a_folder_needs_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passed = {"cache_folder": "/models", "model_kwargs": {"local_files_only": True, "revision": "main"}}
    assert embedding(model=str(tmp_path), **passed) == {"model": str(tmp_path)}
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert embedding(cache_folder=tmp_path) == {}  # that of the environment
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert embedding(model_kwargs={"local_files_only": True}) == {}


def test_an_own_option_is_the_adapters() -> None:
    passed = {"embed_batch_size": -1, "show_progress_bar": "x", "dimensions": "y"}
    own = OWN | {"embed_batch_size", "show_progress_bar"}
    assert translate_options(passed, own=own, kind="embedding", replaced="HuggingFaceEmbedding") == passed
    assert translate_options({"show_progress": True}, own=()) == {}  # an adapter without a progress bar


def test_an_empty_instruction_of_llama_index_was_not_empty() -> None:
    assert llama_index(model_name="a", query_instruction="", pooling="deprecated") == {
        "model_name": "a", "query_prompt": "", "document_prompt": "",
    }  # fmt: skip
    with pytest.raises(InvalidRequestError, match=GUIDE):
        llama_index(model_name="BAAI/bge-base-en-v1.5", query_instruction="")


def test_secrets_are_hidden_at_every_depth() -> None:
    passed = {"token": "s1", "model": "a", "model_kwargs": {"token": "s2", "model_kwargs": {"token": "s3"}, "b": "c"}}
    hidden = hide_secrets(passed)
    assert not any(secret in str(hidden) for secret in ("s1", "s2", "s3"))
    assert (hidden["model"], hidden["model_kwargs"]["b"], passed["token"]) == ("a", "c", "s1")


@pytest.mark.contract
def test_the_import_costs_neither_torch_nor_pydantic() -> None:
    program = "import sys, millpond.compat.replaced_options; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "millpond.compat.replaced_options" in modules
    assert not {"torch", "pydantic", "transformers"} & set(modules)
