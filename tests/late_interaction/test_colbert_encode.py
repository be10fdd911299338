"""Queries and documents become the tokens that a late-interaction checkpoint was trained on."""

import string
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from millpond.checkpoints.layouts.late_interaction import LateInteraction
from millpond.errors import InputTooLongError, InvalidRequestError, ModelLoadError
from millpond.late_interaction.encoding.markers import ColbertEncoder

# A token's id is its index in this list, as in a vocab.txt.
VOCABULARY = (
    "[PAD] [unused0] [unused1] [UNK] [CLS] [SEP] [MASK] what is machine learning a sub ##set of ai . ? ! [ ] "
    "query : one two three four five six seven"
).split()
ID = {token: number for number, token in enumerate(VOCABULARY)}

# The settings of colbert-ir/colbertv2.0, with other lengths.
STANFORD = LateInteraction(
    query_marker="[unused0]",
    document_marker="[unused1]",
    query_length=12,
    document_length=24,
    expand_to=12,
    skiplist=tuple(string.punctuation),
)
PYLATE = replace(STANFORD, query_marker="[Q] ", document_marker="[D] ", document_length=12, skiplist=(".", "?"))

QUERY, DOCUMENT = "What is machine learning?", "Machine learning is a subset of AI."
LONG = "what is machine learning what is machine learning what is machine learning what is machine learning"


def backend(*added, template="[CLS] $A [SEP]"):
    """A BERT tokenizer; ``added`` tokens get ids behind those of the vocabulary."""
    tokenizer = Tokenizer(models.WordPiece(dict(ID), unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(token, ID[token]) for token in template.split() if token != "$A"]
    )
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in added])
    tokenizer.enable_padding(length=40)  # as files often have it
    tokenizer.enable_truncation(max_length=8)
    return tokenizer


def encoder(late=STANFORD, tokenizer=None, **options):
    special = {"mask": ID["[MASK]"], "end": None, "unknown": ID["[UNK]"]}
    return ColbertEncoder(backend("[Q] ", "[D] ") if tokenizer is None else tokenizer, late, **special | options)


def encode(colbert, text, role="query", **options):
    return colbert.encode([text], role=role, index_of=lambda i: 40 + i, **options)[0]


def ids(tokens):
    return [ID[token] if token in ID else {"[Q]_": len(ID), "[D]_": len(ID) + 1}[token] for token in tokens.split()]


def unscored(encoded):
    return [] if encoded.kept is None else np.flatnonzero(~encoded.kept).tolist()


def test_a_query_is_expanded_by_masks_that_are_not_attended_to():
    out = encode(encoder(), QUERY)
    assert out.ids.tolist() == ids("[CLS] [unused0] what is machine learning ? [SEP] [MASK] [MASK] [MASK] [MASK]")
    assert out.ids.dtype == np.int32
    assert out.attended == 8 and out.kept is None and not out.truncated


def test_the_expansion_may_be_attended_to():
    out = encode(encoder(replace(STANFORD, attend_to_expansion=True)), QUERY)
    assert len(out.ids) == 12 and out.attended is None and out.kept is None


def test_a_document_loses_the_rows_of_its_punctuation():
    out = encode(encoder(), DOCUMENT, "document")
    assert out.ids.tolist() == ids("[CLS] [unused1] machine learning is a sub ##set of ai . [SEP]")
    assert unscored(out) == [10] and out.kept.dtype == np.bool_
    assert out.attended is None and not out.truncated


@pytest.mark.parametrize(("text", "tokens", "skipped"), [("", "", []), ("...", ". . .", [2, 3, 4])])
def test_an_empty_document_keeps_its_markers(text, tokens, skipped):
    out = encode(encoder(), text, "document")
    assert out.ids.tolist() == ids(f"[CLS] [unused1] {tokens} [SEP]")
    assert unscored(out) == skipped


def test_an_empty_query_is_all_expansion():
    out = encode(encoder(), "")
    assert out.ids.tolist() == ids("[CLS] [unused0] [SEP]" + " [MASK]" * 9) and out.attended == 3


def test_a_long_query_keeps_its_end_token():
    out = encode(encoder(), LONG)
    assert out.ids.tolist() == ids("[CLS] [unused0] what is machine learning what is machine learning what [SEP]")
    assert out.truncated and out.attended is None


def test_pylate_without_expansion():
    colbert = encoder(replace(PYLATE, expand_to=None))
    query = encode(colbert, QUERY)
    assert query.ids.tolist() == ids("[CLS] [Q]_ what is machine learning ? [SEP]")
    assert query.attended is None and query.kept is None
    document = encode(colbert, DOCUMENT, "document")
    assert document.ids.tolist() == ids("[CLS] [D]_ machine learning is a sub ##set of ai . [SEP]")
    assert unscored(document) == [10] and not document.truncated


def test_pylate_with_attended_expansion():
    out = encode(encoder(replace(PYLATE, attend_to_expansion=True)), QUERY)
    assert out.ids.tolist() == ids("[CLS] [Q]_ what is machine learning ? [SEP]" + " [MASK]" * 4)
    assert out.attended is None


def test_a_long_query_without_a_maximum_is_neither_expanded_nor_cut():
    out = encode(encoder(replace(STANFORD, query_length=None)), LONG)
    assert len(out.ids) == 19 and not out.truncated and out.attended is None
    assert len(encode(encoder(replace(STANFORD, query_length=None)), QUERY).ids) == 12


def test_the_skiplist_may_apply_to_queries_too():
    out = encode(encoder(replace(STANFORD, skiplist_roles=("query", "document"))), QUERY)
    assert unscored(out) == [6]


def test_the_end_token_expands_queries_without_a_mask_token():
    out = encode(encoder(mask=None, end=ID["[SEP]"]), QUERY)
    assert out.ids.tolist()[8:] == [ID["[SEP]"]] * 4


def test_a_named_token_expands_queries():
    out = encode(encoder(replace(STANFORD, expansion_token="[PAD]")), QUERY)
    assert out.ids.tolist()[8:] == [ID["[PAD]"]] * 4


@pytest.mark.parametrize("late", [STANFORD, replace(STANFORD, expansion_token="[nowhere]")])
def test_a_tokenizer_without_an_expansion_token_is_refused(late):
    with pytest.raises(ModelLoadError, match="filled up with"):
        encoder(late, mask=None)


@pytest.mark.parametrize(
    ("late", "text", "expected"),
    [
        (STANFORD, "[unused0]", "[ [UNK] ]"),
        (PYLATE, "[Q] what", "[ [UNK] ] what"),
        (PYLATE, "what [D] is", "what [ [UNK] ] is"),
        (STANFORD, "[MASK]", "[MASK]"),
    ],
)
def test_a_marker_in_a_text_is_tokenized_as_text(late, text, expected):
    out = encode(encoder(late), text, "document")
    marker = "[unused1]" if late is STANFORD else "[D]_"
    assert out.ids.tolist() == ids(f"[CLS] {marker} {expected} [SEP]")


@pytest.mark.parametrize("added", [("[Q] ", "[D] "), ("[unused0]", "[Q] ", "[D] "), ("[Q] ", "[other]", "[D] ", "[x]")])
def test_hiding_markers_changes_no_id(added):
    tokenizer = backend(*added)
    before = tokenizer.get_vocab()
    late = replace(PYLATE, query_marker=added[0])
    colbert = encoder(late, tokenizer)
    after = colbert._backend.get_vocab()
    hidden = {"[Q] ", "[D] "}
    assert {token: number for token, number in after.items() if token in before} == {
        token: number for token, number in before.items() if token not in hidden or token in after
    }
    assert hidden & after.keys() == ({"[Q] "} if added[0] == "[unused0]" else set())
    assert tokenizer.get_vocab() == before  # the engine's tokenizer is unchanged


def test_a_marker_that_is_not_a_token_is_text():
    out = encode(encoder(replace(PYLATE, query_marker="Query: ", expand_to=None)), QUERY)
    assert out.ids.tolist() == ids("[CLS] query : what is machine learning ? [SEP]")


def test_a_query_without_a_marker():
    out = encode(encoder(replace(PYLATE, query_marker="", expand_to=None)), QUERY)
    assert out.ids.tolist() == ids("[CLS] what is machine learning ? [SEP]")


def test_a_prompt_follows_the_marker_and_is_never_cut():
    out = encode(encoder(replace(STANFORD, expand_to=None)), LONG, prompt="query: ", limit=8)
    assert out.ids.tolist() == ids("[CLS] [unused0] query : what is machine [SEP]") and out.truncated
    out = encode(encoder(replace(STANFORD, expand_to=None)), LONG, prompt="query: ", limit=8, truncate="start")
    assert out.ids.tolist() == ids("[CLS] [unused0] query : is machine learning [SEP]")


def test_the_start_may_be_cut():
    out = encode(encoder(), "one two three four five six seven what is machine learning", truncate="start")
    assert out.ids.tolist() == ids("[CLS] [unused0] three four five six seven what is machine learning [SEP]")


@pytest.mark.parametrize("role", ["query", "document"])
def test_a_limit_lowers_both_lengths_and_the_expansion(role):
    out = encode(encoder(), QUERY, role, limit=6)
    assert len(out.ids) == 6 and out.truncated
    out = encode(encoder(), "what", role, limit=6)
    assert len(out.ids) == (6 if role == "query" else 4) and not out.truncated


def test_a_limit_above_the_checkpoints_own_has_no_effect():
    assert len(encode(encoder(), LONG, limit=100).ids) == 12
    assert len(encode(encoder(), f"{LONG} {LONG}", "document", limit=100).ids) == 24


def test_too_long_is_an_error_on_request():
    with pytest.raises(InputTooLongError, match=r"query at index 40 has 19 tokens, more than 12.*truncate=\"end\""):
        encode(encoder(), LONG, truncate="error")
    with pytest.raises(InputTooLongError, match="takes? 3 of a document's 3"):
        encode(encoder(), DOCUMENT, "document", limit=3)


@pytest.mark.parametrize("length", [10, 11])
def test_exactly_the_limit_is_not_cut(length):
    out = encode(encoder(replace(STANFORD, document_length=12)), " ".join(["what"] * (length - 2)), "document")
    assert len(out.ids) == length + 1 and not out.truncated


def test_unknown_tokens_are_scored_although_words_of_the_skiplist_are_unknown():
    out = encode(encoder(), "what % is \N{SNOWMAN}", "document")
    assert unscored(out) == [] and out.ids.tolist().count(ID["[UNK]"]) == 2
    out = encode(encoder(replace(STANFORD, skiplist=("[UNK]",))), "what % is", "document")
    assert unscored(out) == [3]


def test_a_text_without_any_token():
    bare = replace(STANFORD, query_marker="", document_marker="", expand_to=None)
    colbert = encoder(bare, backend(template="$A"))
    assert encode(colbert, "", "document").ids.tolist() == [ID["[MASK]"]]
    assert encode(colbert, "what").ids.tolist() == [ID["what"]]
    with pytest.raises(InvalidRequestError, match="index 40 has no tokens"):
        encode(encoder(bare, backend(template="$A"), mask=None), "")


def test_case_is_folded_before_tokenizing():
    tokenizer = backend()
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    assert ID["[UNK]"] in encode(encoder(tokenizer=tokenizer), QUERY).ids
    out = encode(encoder(tokenizer=tokenizer, lower=True), QUERY)
    assert out.ids.tolist()[:8] == ids("[CLS] [unused0] what is machine learning ? [SEP]")


def test_texts_are_encoded_alike_together_and_alone():
    colbert = encoder()
    texts = [QUERY, "", LONG, DOCUMENT]
    for role in ("query", "document"):
        together = colbert.encode(texts, role=role, index_of=lambda i: i)
        for one, text in zip(together, texts, strict=True):
            alone = encode(colbert, text, role)
            assert one.ids.tolist() == alone.ids.tolist() and one.attended == alone.attended
            assert unscored(one) == unscored(alone) and one.truncated == alone.truncated
