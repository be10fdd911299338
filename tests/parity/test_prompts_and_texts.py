"""Text processing compared with sentence-transformers: prompts, lengths, case, unusual texts."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.parity.comparison import VISIBLE, assert_equal, assert_same_vectors, difference
from tests.tiny import (
    FAMILIES,
    MAX_TOKENS,
    SENTENCES,
    Layout,
)
from tests.tiny import TEXTS as SAMPLES

pytestmark = pytest.mark.contract  # two engines for each case, one of them a peer's

TEXTS = list(SAMPLES)
PROMPTS = {"query": "Find the passage: ", "document": "Passage about water: ", "other": "the miller's "}


# --- Prompts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["old", "new"])
def test_prompts_by_role_name_and_text(style, load):
    engine, reference = load(Layout(prompts=PROMPTS, style=style))
    pairs = [
        (engine.embed(TEXTS), reference.encode(TEXTS)),
        (engine.embed(TEXTS, role="query"), reference.encode_query(TEXTS)),
        (engine.embed(TEXTS, role="document"), reference.encode_document(TEXTS)),
        (engine.embed(TEXTS, prompt_name="other"), reference.encode(TEXTS, prompt_name="other")),
        (engine.embed(TEXTS, prompt="Reeds: "), reference.encode(TEXTS, prompt="Reeds: ")),
        (engine.embed(TEXTS, role="query", prompt=""), reference.encode_query(TEXTS, prompt="")),
    ]
    for output, expected in pairs:
        assert_equal(output.embeddings, expected)
    for i, (_, expected) in enumerate(pairs[:-1]):
        for _, other in pairs[:i]:
            assert difference(expected, other) > VISIBLE  # the last has no prompt, as the first


def test_a_default_prompt_and_how_to_switch_it_off(load):
    engine, reference = load(Layout(prompts=PROMPTS, default_prompt_name="other"))
    assert_equal(engine.embed(TEXTS).embeddings, reference.encode(TEXTS))
    assert_equal(engine.embed(TEXTS).embeddings, reference.encode(TEXTS, prompt_name="other"))
    assert_equal(engine.embed(TEXTS, prompt="").embeddings, reference.encode(TEXTS, prompt=""))
    assert_equal(engine.embed(TEXTS, role="query").embeddings, reference.encode_query(TEXTS))
    assert difference(engine.embed(TEXTS).embeddings, engine.embed(TEXTS, prompt="").embeddings) > VISIBLE


def test_a_role_without_a_prompt(load):
    engine, reference = load(Layout(prompts={"query": "Find: "}))
    assert_equal(engine.embed(TEXTS, role="document").embeddings, reference.encode_document(TEXTS))
    assert_equal(engine.embed(TEXTS, role="query").embeddings, reference.encode_query(TEXTS))


def test_a_role_without_a_prompt_does_not_get_the_default(load):
    engine, reference = load(Layout(prompts={"other": "the miller's "}, default_prompt_name="other"))
    for output, expected in (
        (engine.embed(TEXTS), reference.encode(TEXTS)),
        (engine.embed(TEXTS, role="query"), reference.encode_query(TEXTS)),
        (engine.embed(TEXTS, role="document"), reference.encode_document(TEXTS)),
    ):
        assert_equal(output.embeddings, expected)


@pytest.mark.parametrize("name", ["passage", "corpus"])
def test_a_documents_prompt_by_its_older_names(name, load):
    """As documented for encode_document; but sentence-transformers 6.2 finds its own empty "document" prompt first."""
    engine, reference = load(Layout(prompts={"query": "query: ", name: "passage: "}))
    actual = engine.embed(TEXTS, role="document").embeddings
    assert_equal(actual, reference.encode(TEXTS, prompt_name=name))
    assert difference(actual, engine.embed(TEXTS).embeddings) > VISIBLE


def test_token_states_with_a_prompt(load):
    engine, reference = load(Layout(prompts=PROMPTS))
    expected = reference.encode_query(TEXTS, output_value="token_embeddings", convert_to_numpy=False)
    actual = engine.token_embed(TEXTS, role="query").embeddings
    for matrix, other in zip(actual, expected, strict=True):
        assert_equal(matrix, other.numpy())


# --- Tokenization ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["old", "new"])
@pytest.mark.parametrize("length", [5, 16, 40])
def test_max_seq_length(length, style, load):
    engine, reference = load(Layout(style=style, max_seq_length=length, prompts=PROMPTS))
    assert engine.spec.max_length == reference.max_seq_length == length
    output = engine.embed(TEXTS)
    assert_equal(output.embeddings, reference.encode(TEXTS))
    assert output.truncated.tolist() == [len(reference.tokenizer(text)["input_ids"]) > length for text in TEXTS]
    assert output.usage.prompt_tokens == sum(min(length, len(reference.tokenizer(text)["input_ids"])) for text in TEXTS)
    if length > 16:
        assert_equal(engine.embed(TEXTS, role="query").embeddings, reference.encode_query(TEXTS))


@pytest.mark.parametrize("family", ["bert", "roberta", "mistral"])
def test_a_length_from_the_tokenizer_or_the_positions(family, load):
    """Without max_seq_length the position table is the limit, for RoBERTa without its padding rows."""
    engine, reference = load(Layout(style="new"), family, tokenizer_limit=None)
    assert engine.spec.max_length == MAX_TOKENS
    reference.max_seq_length = MAX_TOKENS  # sentence-transformers would run RoBERTa past its table
    assert_same_vectors((engine, reference))


@pytest.mark.parametrize("style", ["old", "new"])
def test_do_lower_case(style, load):
    texts = [text.upper() for text in TEXTS] + ["ÉTANG Ärger ΣΊΣΥΦΟΣ"]
    engine, reference = load(Layout(style=style, do_lower_case=True, prompts={"query": "FIND: "}))
    assert_same_vectors((engine, reference), texts)
    assert_equal(engine.embed(texts, role="query").embeddings, reference.encode_query(texts))
    lower = engine.embed([text.lower() for text in texts]).embeddings
    assert_equal(engine.embed(texts).embeddings, lower)


def test_case_matters_without_do_lower_case(load):
    engine, reference = load(Layout())
    upper = [text.upper() for text in TEXTS]
    assert_same_vectors((engine, reference), upper)
    assert difference(engine.embed(upper).embeddings, engine.embed(TEXTS).embeddings) > VISIBLE


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_do_lower_case_beyond_ascii(family, load):
    """Lower case that depends on context or changes the length: final sigma, dotted capital I, capital sharp s."""
    engine, reference = load(Layout(style="old", do_lower_case=True), family)
    assert_same_vectors((engine, reference), ["ΣΊΣΥΦΟΣ ΟΔΟΣ", "İstanbul", "STRAẞE", "ÉTANG"])


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_tokenizer_without_special_tokens(family, load):
    engine, reference = load(Layout(modules=FAMILIES[family].modules), family, template="$A")
    assert_same_vectors((engine, reference))
    actual = engine.embed(["", *TEXTS]).embeddings
    assert_equal(actual[1:], engine.embed(TEXTS).embeddings)
    assert_equal(actual[:1], engine.embed([""]).embeddings)  # compared with itself: sentence-transformers fails here
    assert np.isfinite(actual).all()


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "llama", "qwen3"])
def test_odd_texts(family, load):
    """Empty and blank texts, line breaks, emoji, a text that looks like a special token."""
    specials = json.dumps(["[SEP]", "</s>", "<|endoftext|>", "[CLS] a"])
    texts = ["", " ", "\n\t", "a\nb", "🙂 pond", specials, "x" * 300, "a" * 20 + " b", SENTENCES[0] * 4]
    assert_same_vectors(load(Layout(modules=FAMILIES[family].modules), family), texts)
