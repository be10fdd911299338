"""Prompts of queries and documents: which text, and what is told where a replaced class gave another."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from millpond import ModelSpec
from millpond.compat import notices
from millpond.compat.notices import log_prompt_notice, prompt_notice
from millpond.compat.prompts import PromptOptions, role_prompt
from millpond.errors import InvalidRequestError
from millpond.values.spec import PoolingMode

NONE = PromptOptions()
SEARCH = "Represent this sentence for searching relevant passages: "


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


def notice(of: ModelSpec, replaced: Any = "HuggingFaceEmbeddings", **options: Any) -> str | None:
    return prompt_notice(
        of,
        {"query": options.get("query", NONE), "document": options.get("document", NONE)},
        normalize=options.get("normalize"),
        pooling=options.get("pooling"),
        replaced=replaced,
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


def test_a_prompt_that_langchains_class_never_applied_is_told() -> None:
    told = notice(spec(query="search_query: ", document='say "hi":\n'))
    assert told is not None
    assert "\n" not in told
    assert 'queries get the prompt "search_query: " (HuggingFaceEmbeddings: no prompt)' in told
    assert 'documents get the prompt "say \\"hi\\":\\n" (HuggingFaceEmbeddings: no prompt)' in told
    assert 'To keep its vectors: query_prompt="", document_prompt="", dtype="float32".' in told
    assert told.endswith('without this notice: query_prompt="auto", document_prompt="auto"')


def test_a_default_prompt_was_applied_to_both() -> None:
    told = notice(spec(query="q: ", document="d: ", default="query"))
    assert told is not None
    assert 'documents get the prompt "d: " (HuggingFaceEmbeddings: the prompt "q: ")' in told
    assert "queries get" not in told
    assert 'query_prompt="q: ", document_prompt="q: ", dtype="float32"' in told


def test_llama_indexs_class_had_prompts_of_its_own() -> None:
    told = notice(spec("BAAI/bge-base-en-v1.5"), "HuggingFaceEmbedding")
    assert told is not None
    assert 'queries get no prompt (HuggingFaceEmbedding: the prompt "Represent this question' in told
    assert 'query_prompt="Represent this question for searching relevant passages: "' in told
    assert told.endswith('without this notice: query_prompt=""')
    # It replaced the checkpoint's default prompt, too, and knew full names only.
    assert notice(spec("bge-base-en-v1.5"), "HuggingFaceEmbedding") is None
    told = notice(spec(query="q: ", default="query"), "HuggingFaceEmbedding")
    assert told is not None
    assert 'query_prompt="", document_prompt=""' in told


def test_llama_indexs_class_normalized() -> None:
    told = notice(spec(normalize=False), "HuggingFaceEmbedding")
    assert told is not None
    assert 'query_prompt="", document_prompt="", normalize=True, dtype="float32"' in told
    assert notice(spec(normalize=False), "HuggingFaceEmbedding", normalize=False) is None
    assert notice(spec(normalize=False)) is None


def test_llama_indexs_class_normalized_by_modules_in_spite_of_its_option() -> None:
    told = notice(spec(), "HuggingFaceEmbedding", normalize=False)
    assert told is not None
    assert told.endswith('To keep its vectors: query_prompt="", document_prompt="", normalize=True, dtype="float32"')
    with_prompts = notice(spec(query="q: "), "HuggingFaceEmbedding", normalize=False)
    assert with_prompts is not None
    assert 'normalize=True, dtype="float32". To keep these, without this notice: query_prompt="auto"' in with_prompts
    assert notice(spec(bare=True), "HuggingFaceEmbedding", normalize=False) is None
    assert notice(spec(), "HuggingFaceEmbeddings", normalize=False) is None  # an option that it did not have


def test_a_checkpoint_without_modules_was_pooled_by_the_mean_and_not_normalized() -> None:
    told = notice(spec(bare=True, pooling="cls"))
    assert told is not None
    assert 'the pooling is "cls", as there is no modules.json (HuggingFaceEmbeddings: "mean")' in told
    keep = 'query_prompt="", document_prompt="", pooling="mean", normalize=False, dtype="float32".'
    assert keep in told
    assert told.endswith('without this notice: pooling="cls", normalize=True')
    told = notice(spec(bare=True, pooling="cls"), "HuggingFaceEmbedding")
    assert told is not None
    assert "normalize=" not in told  # that class normalized
    assert notice(spec(bare=True, pooling="mean"), "HuggingFaceEmbedding") is None
    told = notice(spec(bare=True, pooling="mean", architecture="Qwen2ForCausalLM"), pooling=None)
    assert told is not None
    assert 'pooling="lasttoken"' in told
    assert notice(spec(bare=True, pooling="cls"), pooling="cls", normalize=True) is None
    assert notice(spec(pooling="cls")) is None


@pytest.mark.parametrize("role", ["query", "document"])
@pytest.mark.parametrize("options", [PromptOptions(text=""), PromptOptions(text="auto"), PromptOptions(name="query")])
def test_who_sets_the_prompt_is_told_nothing(role: str, options: PromptOptions) -> None:
    other = "document" if role == "query" else "query"
    assert notice(spec(**{role: "p: "}), **{role: options}) is None
    assert notice(spec(query="q: ", document="d: "), query=options, document=options) is None
    told = notice(spec(query="q: ", document="d: "), **{role: options})
    assert told is not None
    assert f'{other}_prompt=""' in told
    assert f"{role}_prompt=" not in told


def test_nothing_is_told_where_nothing_differs() -> None:
    for of in (spec(), spec(query="", document=""), spec(clustering="c: ")):
        assert notice(of) is None
        assert notice(of, "HuggingFaceEmbedding") is None


def test_the_notice_is_logged_once_for_each_configuration(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "_logged", {})
    of = spec(query="q: ")
    with caplog.at_level(logging.WARNING, logger="millpond"):
        for options in (NONE, NONE, PromptOptions(text="")):
            prompts = {"query": options, "document": NONE}
            log_prompt_notice(of, prompts, normalize=None, replaced="HuggingFaceEmbeddings")
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        prompts = {"query": NONE, "document": NONE}
        log_prompt_notice(of, prompts, normalize=None, replaced="HuggingFaceEmbedding")
    assert len(caplog.records) == 2
