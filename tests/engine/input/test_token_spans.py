"""Token spans: one entry for each row of token_embed, with the row's characters in the caller's text."""

import asyncio
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.tiny import SENTENCES, Layout, Normalize, Pooling, write_checkpoint
from tests.tiny.heads import write_pylate, write_stanford

from millpond import AsyncEngine, Engine, TokenSpans
from millpond.errors import UnsupportedTaskError

# One family of each kind of tokenizer.
FAMILIES = {
    "bert": "wordpiece",
    "roberta": "byte-level BPE",
    "xlm-roberta": "unigram",
    "llama": "metaspace BPE with byte fallback",
    "qwen2": "byte-level BPE without special tokens before the text",
    "gemma": "metaspace BPE",
}
TEXTS = [
    "The old mill stands where the river leaves the forest.",
    "",
    " ",
    "a",
    "  two  spaces\tand\na line ",
    "Ein Teich, une étang, 池。 e\u0301 İstanbul ΑΣ",
    "🙂👩‍👩‍👧 emoji, then words",
    "[CLS] the [MASK] literally [SEP] </s> <s>",
    " ".join(SENTENCES),
    "?!?",
    "ﬁne ligatures Ⅷ ½",
    "unfathomablenessnesses",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("token_spans")


@pytest.fixture(scope="module")
def engine_of(folder: Path) -> Iterator:
    """The engine of a name; each is loaded once."""
    engines: list[Engine] = []

    @cache
    def load(name: str) -> Engine:
        kind, _, family = name.partition(" ")
        if kind == "stanford":
            path = write_stanford(folder / name, family or "bert")
        elif kind == "pylate":
            path = write_pylate(folder / name)
        elif kind == "prompted":
            prompts = {"query": "Query: ", "document": "Title of it. "}
            layout = Layout(modules=(Pooling(), Normalize()), prompts=prompts)
            path = write_checkpoint(folder / name, family, sentence_transformers=layout)
        elif kind == "uncased":
            layout = Layout(modules=(Pooling(), Normalize()), do_lower_case=True)
            path = write_checkpoint(folder / name, "bert", sentence_transformers=layout)
        else:
            path = write_checkpoint(folder / name, family)
        engine = Engine(str(path), device="cpu", dtype="float32", convert="embed" if kind == "plain" else "auto")
        engines.append(engine)
        return engine

    yield load
    for engine in engines:
        engine.close()


CHECKPOINTS = [
    *(f"plain {family}" for family in FAMILIES),
    "prompted bert",
    "prompted roberta",
    "prompted xlm-roberta",
    "uncased",
    "stanford",
    "stanford jina",
    "pylate",
]


def folded(text: str) -> str:
    """A text without what normalizers change: case, accents, compatibility forms, spaces and their marks."""
    for mark in ("\u2581", "\u0120", "\u010a", "\u0109", "##"):
        text = text.replace(mark, " ")
    text = unicodedata.normalize("NFKD", text.lower())
    return "".join(letter for letter in text if not unicodedata.combining(letter) and not letter.isspace())


@pytest.mark.parametrize("role", [None, "query", "document"])
@pytest.mark.parametrize("truncate", ["end", "start"])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_every_row_of_token_embed_has_an_entry_and_its_token_is_the_text_there(engine_of, name, role, truncate):
    engine = engine_of(name)
    rows = engine.token_embed(TEXTS, role=role, truncate=truncate).embeddings
    spans = engine.token_spans(TEXTS, role=role, truncate=truncate)
    assert [len(entry) for entry in spans] == rows.lengths.tolist()
    seen = 0
    for text, entry in zip(TEXTS, spans, strict=True):
        assert isinstance(entry, TokenSpans) and len(entry.tokens) == len(entry.offsets)
        assert entry.offsets.dtype == np.int32 and entry.offsets.shape == (len(entry), 2)
        assert (entry.offsets >= 0).all() and (entry.offsets <= len(text)).all()
        for token, (start, end) in zip(entry.tokens, entry.offsets.tolist(), strict=True):
            assert start < end or (start, end) == (0, 0)
            if start < end and token.isascii() and not token.startswith("<0x") and "unk" not in token.lower():
                seen += 1
                if text[start:end].isascii():
                    assert folded(token) == folded(text[start:end])
        found = np.zeros(len(text), dtype=np.bool_)
        for start, end in entry.offsets.tolist():
            found[start:end] = True
        if len(text) < 40 and truncate == "end" and "pylate" not in name and "stanford" not in name:
            letters = [i for i, letter in enumerate(text) if letter.isalpha() and letter.isascii()]
            assert found[letters].all()  # nothing is left out of a text that is not cut
    assert seen > 20


def test_the_tokens_of_a_colbert_query_are_marker_text_and_expansion(engine_of):
    engine = engine_of("stanford")
    (entry,) = engine.token_spans(["The pond, water."], role="query")
    assert entry.tokens[:2] == ("[CLS]", "[unused0]")
    assert len(entry) == 12 and entry.tokens[-1] == "[MASK]"
    last = entry.tokens.index("[SEP]")
    assert not entry.offsets[[0, 1, *range(last, 12)]].any()
    assert [("The pond, still."[start:end]) for start, end in entry.offsets[2:last]] == [
        "The",
        "pond",
        ",",
        "still",
        ".",
    ]


def test_rows_of_the_skiplist_are_left_out_of_a_document(engine_of):
    engine = engine_of("stanford")
    text = "The pond, water; the wheel."
    (entry,) = engine.token_spans([text], role="document")
    assert entry.tokens[1] == "[unused1]"
    assert [text[start:end] for start, end in entry.offsets[2:-1]] == ["The", "pond", "water", "the", "wheel"]


@pytest.mark.parametrize("name", ["plain bert", "plain roberta", "plain xlm-roberta", "plain llama"])
def test_spans_are_those_that_transformers_tokenizer_reports(engine_of, name):
    engine = engine_of(name)
    text = "The old mill. " + TEXTS[5]
    (entry,) = engine.token_spans([text])
    expected = engine.tokenizer(text, return_offsets_mapping=True)
    offsets = [tuple(span) if span[0] < span[1] else (0, 0) for span in expected["offset_mapping"]]
    assert list(entry.tokens) == engine.tokenizer.convert_ids_to_tokens(expected["input_ids"])
    assert [tuple(span) for span in entry.offsets.tolist()] == offsets


def test_the_prompt_of_a_role_has_empty_spans(engine_of):
    engine = engine_of("prompted bert")
    for role, count in (("query", 2), ("document", 4)):
        (entry,) = engine.token_spans(["The pond"], role=role)
        (plain,) = engine.token_spans(["The pond"])
        extra = len(entry) - len(plain)
        assert extra >= count
        assert not entry.offsets[: extra + 1].any()
        assert np.array_equal(entry.offsets[extra:], plain.offsets)


def test_bytes_of_one_character_have_its_span(engine_of):
    (entry,) = engine_of("plain qwen2").token_spans(["a🙂b"])
    spans = [tuple(span) for span in entry.offsets.tolist()]
    assert sorted({*spans} - {(0, 0)}) == [(0, 1), (1, 2), (2, 3)]
    assert spans.count((1, 2)) > 1


_ENGINES = ["plain bert", "plain roberta", "plain xlm-roberta", "plain llama", "stanford", "pylate"]


@pytest.mark.parametrize("name", _ENGINES)
@given(
    text=st.text(max_size=60), role=st.sampled_from(["query", "document"]), truncate=st.sampled_from(["end", "start"])
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_has_as_many_entries_as_rows(engine_of, name, text, role, truncate):
    engine = engine_of(name)
    (entry,) = engine.token_spans([text], role=role, truncate=truncate)
    assert len(entry) == len(engine.token_embed([text], role=role, truncate=truncate).embeddings[0])
    starts, ends = entry.offsets.T
    assert ((starts < ends) | (ends == 0)).all() and (ends <= len(text)).all()


def test_a_checkpoint_without_token_vectors_is_refused(folder):
    path = write_checkpoint(folder / "classifier", "bert", head="SequenceClassification")
    with Engine(str(path), device="cpu", dtype="float32") as engine:
        assert "token_embed" not in engine.tasks
        with pytest.raises(UnsupportedTaskError, match="token_embed"):
            engine.token_spans(["a"])


async def test_the_asynchronous_engine_has_the_same_method(engine_of):
    engine = engine_of("stanford")
    expected = engine.token_spans(TEXTS, role="query")
    spans = await asyncio.wait_for(AsyncEngine(engine).token_spans(TEXTS, role="query"), 60)
    for entry, other in zip(spans, expected, strict=True):
        assert entry.tokens == other.tokens and np.array_equal(entry.offsets, other.offsets)
