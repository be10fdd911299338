"""What the adapters of frameworks do with prompts and with the options of the classes that they replace."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from millpond import ModelSpec
from millpond.compat import notices
from millpond.compat.prompts import PromptOptions, role_prompt
from millpond.compat.replaced_options import hide_secrets, translate_options
from millpond.errors import InvalidRequestError
from millpond.values.spec import PoolingMode

NONE = PromptOptions()
SEARCH = "Represent this sentence for searching relevant passages: "
OWN = frozenset(
    "model model_name revision device dtype max_length hf_overrides normalize dimensions query_prompt document_prompt "
    "query_prompt_name document_prompt_name trust_remote_code show_progress truncate activation".split()
)
GUIDE = r"is not available here; .*docs/migrate/index\.md says more"

# Options of the classes that are replaced: translated, accepted, or refused with the page that says more


def embedding(**options: Any) -> dict[str, Any]:
    return translate_options(options, own=OWN, kind="embedding", replaced="HuggingFaceEmbeddings")


def llama_index(**options: Any) -> dict[str, Any]:
    return translate_options(options, own=OWN, kind="embedding", replaced="HuggingFaceEmbedding")


def scoring(**options: Any) -> dict[str, Any]:
    return translate_options(options, own=OWN, kind="scoring")


def sparse(**options: Any) -> dict[str, Any]:
    return translate_options(options, own=OWN, kind="sparse")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"model_name_or_path": "a", "revision": "v1"}, {"model": "a", "revision": "v1"}),
        ({"model_kwargs": {"torch_dtype": "half", "device": "cuda:1"}}, {"dtype": "float16", "device": "cuda:1"}),
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
            {"encode_kwargs": {"normalize_embeddings": False, "batch_size": 32, "show_progress_bar": True}},
            {"show_progress": True},
        ),
        ({"encode_kwargs": {"convert_to_tensor": True, "precision": "float32", "device": "cpu"}}, {"device": "cpu"}),
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


@pytest.mark.torch
def test_objects_of_torch_are_translated() -> None:
    import torch

    inner = {"device": None, "model_kwargs": {"torch_dtype": torch.bfloat16}, "trust_remote_code": True}
    assert embedding(model_kwargs=inner) == {"dtype": "bfloat16"}
    assert embedding(model_kwargs={"device": torch.device("cuda:1")}) == {"device": "cuda:1"}
    assert scoring(cross_encoder_kwargs={"activation_fn": torch.nn.Sigmoid()}) == {"activation": "sigmoid"}
    with pytest.raises(InvalidRequestError, match=GUIDE):
        scoring(model="a", activation_fn=torch.nn.Tanh())


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
    }
    assert scoring(cross_encoder_kwargs=crossed) == {"max_length": 9, "dtype": "float16"}
    assert scoring(automodel_args={"torch_dtype": "float32"}, use_fp16=True) == {"dtype": "float32"}
    assert scoring(model="a", tokenizer="a", use_fp16=False) == {"model": "a", "dtype": "float32"}
    for options in ({"num_labels": 2}, {"tokenizer": "b"}, {"encode_kwargs": {}}):
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


def test_of_two_models_of_one_name_a_scorer_takes_the_cross_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert scoring(model="stsb-roberta-base") == {"model": "cross-encoder/stsb-roberta-base"}
    assert embedding(model="stsb-roberta-base") == {"model": "stsb-roberta-base"}  # the engine finds the owner
    for name in ("bert-base-uncased", "all-MiniLM-L6-v2", "owner/stsb-roberta-base", "./stsb-roberta-base", "", None):
        assert scoring(model=name) == {"model": name}
    (tmp_path / "stsb-roberta-base").mkdir()
    assert scoring(model="stsb-roberta-base") == {"model": "stsb-roberta-base"}  # a folder


def test_a_folder_needs_no_hub(tmp_path: Path) -> None:
    passed = {"cache_folder": "/models", "model_kwargs": {"local_files_only": True, "revision": "main"}}
    assert embedding(model=str(tmp_path), **passed) == {"model": str(tmp_path)}


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


# Prompts of queries and documents


def spec(
    name: str = "owner/name",
    *,
    default: str | None = None,
    normalize: bool = True,
    pooling: PoolingMode = "mean",
    bare: bool = False,
    architecture: str = "BertModel",
    **prompts: str,
) -> ModelSpec:
    return ModelSpec(
        name=name,
        architecture=architecture,
        model_type="bert",
        pooling=(pooling,),
        has_modules=not bare,
        normalize=normalize,
        dimensions=8,
        hidden_size=8,
        matryoshka=False,
        matryoshka_dimensions=None,
        prompts=prompts,
        default_prompt_name=default,
        labels=(),
        max_length=64,
        tasks=frozenset({"embed"}),
        digest=lambda: "x",
    )


@pytest.mark.parametrize(
    ("prompts", "options", "query", "document"),
    [
        ({}, {}, "", ""),
        ({"query": "q: ", "passage": "p: "}, {}, "q: ", "p: "),
        ({"query": "q: "}, {"text": ""}, "", ""),
        ({"query": "q: "}, {"text": "x"}, "x", "x"),
        ({"query": "q: ", "ask": "a: "}, {"name": "ask"}, "a: ", "a: "),
        ({}, {"name": "query"}, "", ""),  # sentence-transformers gives every model an empty one
        ({"query": "q: "}, {"name": ""}, "", ""),
        ({"query": "q: ", "default": "query"}, {"name": ""}, "q: ", "q: "),
        ({"query": "q: ", "default": "query"}, {}, "q: ", ""),
        ({"query": "q: ", "document": "d: "}, {"text": "auto"}, "q: ", "d: "),
        ({"query": "", "document": ""}, {"text": "auto"}, "", ""),
    ],
    ids=["none", "roles", "off", "text", "name", "predefined", "no-default", "default", "role", "auto", "auto-empty"],
)
def test_the_prompt_of_a_role(prompts: dict[str, str], options: Any, query: str, document: str) -> None:
    of, chosen = spec(**prompts), PromptOptions(**options)
    assert (role_prompt(of, "query", chosen), role_prompt(of, "document", chosen)) == (query, document)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(
        InvalidRequestError, match="query_prompt_name='ask'.*whose prompts are 'query'.*write query_prompt="
    ):
        role_prompt(spec(query="q: "), "query", PromptOptions(name="ask"))


@pytest.mark.parametrize(
    ("name", "query", "document"),
    [
        ("BAAI/bge-base-en-v1.5", SEARCH, ""),
        ("BAAI/bge-small-en", SEARCH, ""),
        ("/data/models/bge-large-en-v1.5/", SEARCH, ""),
        ("C:\\models\\bge-large-en-v1.5", SEARCH, ""),
        ("/cache/models--BAAI--bge-small-zh-v1.5/snapshots/abc", "为这个句子生成表示以用于检索相关文章：", ""),  # noqa: RUF001
        ("BAAI/bge-m3", "", ""),
        ("mixedbread-ai/mxbai-embed-large-v1", SEARCH, ""),
        ("Snowflake/snowflake-arctic-embed-m-v1.5", SEARCH, ""),
        ("Snowflake/snowflake-arctic-embed-l-v2.0", "query: ", ""),
        ("intfloat/e5-base-v2", "query: ", "passage: "),
        ("intfloat/multilingual-e5-small", "query: ", "passage: "),
        ("nomic-ai/nomic-embed-text-v1.5", "search_query: ", "search_document: "),
        ("sentence-transformers/all-MiniLM-L6-v2", "", ""),
        ("thenlper/gte-base", "", ""),
    ],
    ids=lambda value: value.rsplit("/", 1)[-1] if "/" in value else "",
)
def test_auto_is_the_model_cards_prompt_where_the_files_have_none(name: str, query: str, document: str) -> None:
    auto = PromptOptions(text="auto")
    for of in (spec(name), spec(name, query="", document="")):  # sentence-transformers writes empty prompts
        assert (role_prompt(of, "query", auto), role_prompt(of, "document", auto)) == (query, document)
    assert role_prompt(spec(name, query="of the files: "), "query", auto) == "of the files: "


@pytest.mark.parametrize(
    "name", ["owner/my-bge-base-en-v1.5", "bge-base-en-v1.5-finetuned", "BAAI/bge-base-fr", "a", "/"]
)
def test_auto_is_refused_where_nothing_is_known(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=r'query_prompt="auto": the files of .* write query_prompt="\.\.\."'):
        role_prompt(spec(name), "query", PromptOptions(text="auto"))
    with pytest.raises(InvalidRequestError, match='or document_prompt="" for none'):
        role_prompt(spec(name), "document", PromptOptions(text="auto"))


# What is told where a replaced class gave another prompt


class Notice:
    """What is logged about a checkpoint, once."""

    def __init__(self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
        self.caplog, self.monkeypatch = caplog, monkeypatch

    def __call__(self, of: ModelSpec, replaced: Any = "HuggingFaceEmbeddings", **options: Any) -> str:
        self.monkeypatch.setattr(notices, "_logged", {})
        self.caplog.clear()
        prompts: Any = {"query": options.get("query", NONE), "document": options.get("document", NONE)}
        rest: Any = {name: options.get(name) for name in ("normalize", "pooling")}
        with self.caplog.at_level(logging.WARNING, logger="millpond"):
            for _ in range(2):
                notices.log_prompt_notice(of, prompts, **rest, replaced=replaced)
        messages = [record.getMessage() for record in self.caplog.records]
        assert len(messages) <= 1
        return "".join(messages)


@pytest.fixture
def notice(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Notice:
    return Notice(caplog, monkeypatch)


def test_a_prompt_that_langchains_class_never_applied_is_told(notice: Notice) -> None:
    told = notice(spec(query="search_query: ", document='say "hi":\n'))
    assert "\n" not in told
    assert 'queries get the prompt "search_query: " (HuggingFaceEmbeddings: no prompt)' in told
    assert 'documents get the prompt "say \\"hi\\":\\n" (HuggingFaceEmbeddings: no prompt)' in told
    assert 'To keep its vectors: query_prompt="", document_prompt="", dtype="float32".' in told
    assert told.endswith('without this notice: query_prompt="auto", document_prompt="auto"')


def test_a_default_prompt_was_applied_to_both(notice: Notice) -> None:
    told = notice(spec(query="q: ", document="d: ", default="query"))
    assert 'documents get the prompt "d: " (HuggingFaceEmbeddings: the prompt "q: ")' in told
    assert "queries get" not in told
    assert 'query_prompt="q: ", document_prompt="q: ", dtype="float32"' in told


def test_llama_indexs_class_had_prompts_of_its_own(notice: Notice) -> None:
    told = notice(spec("BAAI/bge-base-en-v1.5"), "HuggingFaceEmbedding")
    assert 'queries get no prompt (HuggingFaceEmbedding: the prompt "Represent this question' in told
    assert 'query_prompt="Represent this question for searching relevant passages: "' in told
    assert told.endswith('without this notice: query_prompt=""')
    # It replaced the checkpoint's default prompt, too, and knew full names only.
    assert notice(spec("bge-base-en-v1.5"), "HuggingFaceEmbedding") == ""
    told = notice(spec(query="q: ", default="query"), "HuggingFaceEmbedding")
    assert 'query_prompt="", document_prompt=""' in told


def test_llama_indexs_class_normalized(notice: Notice) -> None:
    told = notice(spec(normalize=False), "HuggingFaceEmbedding")
    assert 'query_prompt="", document_prompt="", normalize=True, dtype="float32"' in told
    assert notice(spec(normalize=False), "HuggingFaceEmbedding", normalize=False) == ""
    assert notice(spec(normalize=False)) == ""


def test_llama_indexs_class_normalized_by_modules_in_spite_of_its_option(notice: Notice) -> None:
    told = notice(spec(), "HuggingFaceEmbedding", normalize=False)
    assert told.endswith('To keep its vectors: query_prompt="", document_prompt="", normalize=True, dtype="float32"')
    with_prompts = notice(spec(query="q: "), "HuggingFaceEmbedding", normalize=False)
    assert 'normalize=True, dtype="float32". To keep these, without this notice: query_prompt="auto"' in with_prompts
    assert notice(spec(bare=True), "HuggingFaceEmbedding", normalize=False) == ""
    assert notice(spec(), "HuggingFaceEmbeddings", normalize=False) == ""  # an option that it did not have


def test_a_checkpoint_without_modules_was_pooled_by_the_mean_and_not_normalized(notice: Notice) -> None:
    told = notice(spec(bare=True, pooling="cls"))
    assert 'the pooling is "cls", as there is no modules.json (HuggingFaceEmbeddings: "mean")' in told
    keep = 'query_prompt="", document_prompt="", pooling="mean", normalize=False, dtype="float32".'
    assert keep in told
    assert told.endswith('without this notice: pooling="cls", normalize=True')
    told = notice(spec(bare=True, pooling="cls"), "HuggingFaceEmbedding")
    assert "normalize=" not in told  # that class normalized
    assert notice(spec(bare=True, pooling="mean"), "HuggingFaceEmbedding") == ""
    told = notice(spec(bare=True, pooling="mean", architecture="Qwen2ForCausalLM"), pooling=None)
    assert 'pooling="lasttoken"' in told
    assert notice(spec(bare=True, pooling="cls"), pooling="cls", normalize=True) == ""
    assert notice(spec(pooling="cls")) == ""


@pytest.mark.parametrize("role", ["query", "document"])
@pytest.mark.parametrize("options", [PromptOptions(text=""), PromptOptions(text="auto"), PromptOptions(name="query")])
def test_who_sets_the_prompt_is_told_nothing(notice: Notice, role: str, options: PromptOptions) -> None:
    other = "document" if role == "query" else "query"
    assert notice(spec(**{role: "p: "}), **{role: options}) == ""
    assert notice(spec(query="q: ", document="d: "), query=options, document=options) == ""
    told = notice(spec(query="q: ", document="d: "), **{role: options})
    assert f'{other}_prompt=""' in told
    assert f"{role}_prompt=" not in told


def test_nothing_is_told_where_nothing_differs(notice: Notice) -> None:
    for of in (spec(), spec(query="", document=""), spec(clustering="c: ")):
        assert notice(of) == ""
        assert notice(of, "HuggingFaceEmbedding") == ""
