"""Queries and documents into the tokens that a late-interaction checkpoint was trained on."""

import string
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from millpond.checkpoints.late_interaction import LateInteraction
from millpond.errors import InputTooLongError, InvalidRequestError, ModelLoadError
from millpond.late_interaction.encode import ColbertEncoder

# Ids are the places in this list, as in a vocab.txt.
VOCABULARY = (
    "[PAD] [unused0] [unused1] [UNK] [CLS] [SEP] [MASK] what is machine learning a sub ##set of ai . ? ! [ ] "
    "query : one two three four five six seven"
).split()
ID = {token: number for number, token in enumerate(VOCABULARY)}

# What is read from the files of colbert-ir/colbertv2.0, but for the lengths.
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
    """A BERT tokenizer; ``added`` tokens get ids behind the vocabulary's."""
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
    named = {"mask": ID["[MASK]"], "end": None, "unknown": ID["[UNK]"]}
    return ColbertEncoder(backend("[Q] ", "[D] ") if tokenizer is None else tokenizer, late, **named | options)


def encode(made, text, role="query", **options):
    return made.encode([text], role=role, position=lambda i: 40 + i, **options)[0]


def ids(tokens):
    return [ID[token] if token in ID else {"[Q]_": len(ID), "[D]_": len(ID) + 1}[token] for token in tokens.split()]


def dropped(encoded):
    return [] if encoded.kept is None else np.flatnonzero(~encoded.kept).tolist()


def test_a_query_is_filled_with_masks_that_nobody_attends_to():
    out = encode(encoder(), QUERY)
    assert out.ids.tolist() == ids("[CLS] [unused0] what is machine learning ? [SEP] [MASK] [MASK] [MASK] [MASK]")
    assert out.ids.dtype == np.int32
    assert out.attended == 8 and out.kept is None and not out.truncated


def test_the_fill_may_be_attended_to():
    out = encode(encoder(replace(STANFORD, attend_to_expansion=True)), QUERY)
    assert len(out.ids) == 12 and out.attended is None and out.kept is None


def test_a_document_loses_the_rows_of_its_punctuation():
    out = encode(encoder(), DOCUMENT, "document")
    assert out.ids.tolist() == ids("[CLS] [unused1] machine learning is a sub ##set of ai . [SEP]")
    assert dropped(out) == [10] and out.kept.dtype == np.bool_
    assert out.attended is None and not out.truncated


@pytest.mark.parametrize(("text", "tokens", "gone"), [("", "", []), ("...", ". . .", [2, 3, 4])])
def test_a_document_of_nothing_keeps_its_markers(text, tokens, gone):
    out = encode(encoder(), text, "document")
    assert out.ids.tolist() == ids(f"[CLS] [unused1] {tokens} [SEP]")
    assert dropped(out) == gone


def test_an_empty_query_is_all_fill():
    out = encode(encoder(), "")
    assert out.ids.tolist() == ids("[CLS] [unused0] [SEP]" + " [MASK]" * 9) and out.attended == 3


def test_a_long_query_keeps_its_end_token():
    out = encode(encoder(), LONG)
    assert out.ids.tolist() == ids("[CLS] [unused0] what is machine learning what is machine learning what [SEP]")
    assert out.truncated and out.attended is None


def test_pylate_without_expansion():
    made = encoder(replace(PYLATE, expand_to=None))
    query = encode(made, QUERY)
    assert query.ids.tolist() == ids("[CLS] [Q]_ what is machine learning ? [SEP]")
    assert query.attended is None and query.kept is None
    document = encode(made, DOCUMENT, "document")
    assert document.ids.tolist() == ids("[CLS] [D]_ machine learning is a sub ##set of ai . [SEP]")
    assert dropped(document) == [10] and not document.truncated


def test_pylate_with_attended_expansion():
    out = encode(encoder(replace(PYLATE, attend_to_expansion=True)), QUERY)
    assert out.ids.tolist() == ids("[CLS] [Q]_ what is machine learning ? [SEP]" + " [MASK]" * 4)
    assert out.attended is None


def test_a_long_query_with_a_floor_only_is_neither_filled_nor_cut():
    out = encode(encoder(replace(STANFORD, query_length=None)), LONG)
    assert len(out.ids) == 19 and not out.truncated and out.attended is None
    assert len(encode(encoder(replace(STANFORD, query_length=None)), QUERY).ids) == 12


def test_the_skiplist_may_be_of_queries_too():
    out = encode(encoder(replace(STANFORD, skiplist_roles=("query", "document"))), QUERY)
    assert dropped(out) == [6]


def test_the_end_token_fills_where_there_is_no_mask():
    out = encode(encoder(mask=None, end=ID["[SEP]"]), QUERY)
    assert out.ids.tolist()[8:] == [ID["[SEP]"]] * 4


def test_a_named_token_fills():
    out = encode(encoder(replace(STANFORD, expansion_token="[PAD]")), QUERY)
    assert out.ids.tolist()[8:] == [ID["[PAD]"]] * 4


@pytest.mark.parametrize("late", [STANFORD, replace(STANFORD, expansion_token="[nowhere]")])
def test_nothing_to_fill_with_is_refused(late):
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
def test_a_text_that_holds_a_marker_is_read_as_text(late, text, expected):
    out = encode(encoder(late), text, "document")
    marker = "[unused1]" if late is STANFORD else "[D]_"
    assert out.ids.tolist() == ids(f"[CLS] {marker} {expected} [SEP]")


@pytest.mark.parametrize("added", [("[Q] ", "[D] "), ("[unused0]", "[Q] ", "[D] "), ("[Q] ", "[other]", "[D] ", "[x]")])
def test_hiding_markers_moves_no_id(added):
    tokenizer = backend(*added)
    before = tokenizer.get_vocab()
    late = replace(PYLATE, query_marker=added[0])
    made = encoder(late, tokenizer)
    after = made._backend.get_vocab()
    hidden = {"[Q] ", "[D] "}
    assert {token: number for token, number in after.items() if token in before} == {
        token: number for token, number in before.items() if token not in hidden or token in after
    }
    assert hidden & after.keys() == ({"[Q] "} if added[0] == "[unused0]" else set())
    assert tokenizer.get_vocab() == before  # the engine's own is left alone


def test_a_prefix_that_is_no_token_is_text():
    out = encode(encoder(replace(PYLATE, query_marker="Query: ", expand_to=None)), QUERY)
    assert out.ids.tolist() == ids("[CLS] query : what is machine learning ? [SEP]")


def test_no_marker():
    out = encode(encoder(replace(PYLATE, query_marker="", expand_to=None)), QUERY)
    assert out.ids.tolist() == ids("[CLS] what is machine learning ? [SEP]")


def test_a_prompt_stands_behind_the_marker_and_is_never_cut():
    out = encode(encoder(replace(STANFORD, expand_to=None)), LONG, prompt="query: ", limit=8)
    assert out.ids.tolist() == ids("[CLS] [unused0] query : what is machine [SEP]") and out.truncated
    out = encode(encoder(replace(STANFORD, expand_to=None)), LONG, prompt="query: ", limit=8, truncate="start")
    assert out.ids.tolist() == ids("[CLS] [unused0] query : is machine learning [SEP]")


def test_the_other_end_may_be_cut():
    out = encode(encoder(), "one two three four five six seven what is machine learning", truncate="start")
    assert out.ids.tolist() == ids("[CLS] [unused0] three four five six seven what is machine learning [SEP]")


@pytest.mark.parametrize("role", ["query", "document"])
def test_a_limit_lowers_both_lengths_and_the_fill(role):
    out = encode(encoder(), QUERY, role, limit=6)
    assert len(out.ids) == 6 and out.truncated
    out = encode(encoder(), "what", role, limit=6)
    assert len(out.ids) == (6 if role == "query" else 4) and not out.truncated


def test_a_limit_above_the_checkpoints_own_changes_nothing():
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


def test_unknown_tokens_are_scored_though_the_skiplist_has_unknown_words():
    out = encode(encoder(), "what % is \N{SNOWMAN}", "document")
    assert dropped(out) == [] and out.ids.tolist().count(ID["[UNK]"]) == 2
    out = encode(encoder(replace(STANFORD, skiplist=("[UNK]",))), "what % is", "document")
    assert dropped(out) == [3]


def test_a_text_without_any_token():
    bare = replace(STANFORD, query_marker="", document_marker="", expand_to=None)
    made = encoder(bare, backend(template="$A"))
    assert encode(made, "", "document").ids.tolist() == [ID["[MASK]"]]
    assert encode(made, "what").ids.tolist() == [ID["what"]]
    with pytest.raises(InvalidRequestError, match="index 40 has no tokens"):
        encode(encoder(bare, backend(template="$A"), mask=None), "")


def test_case_is_folded_before_tokenizing():
    tokenizer = backend()
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    assert ID["[UNK]"] in encode(encoder(tokenizer=tokenizer), QUERY).ids
    out = encode(encoder(tokenizer=tokenizer, lower=True), QUERY)
    assert out.ids.tolist()[:8] == ids("[CLS] [unused0] what is machine learning ? [SEP]")


def test_a_batch_is_its_texts():
    made = encoder()
    texts = [QUERY, "", LONG, DOCUMENT]
    for role in ("query", "document"):
        together = made.encode(texts, role=role, position=lambda i: i)
        for one, text in zip(together, texts, strict=True):
            alone = encode(made, text, role)
            assert one.ids.tolist() == alone.ids.tolist() and one.attended == alone.attended
            assert dropped(one) == dropped(alone) and one.truncated == alone.truncated
