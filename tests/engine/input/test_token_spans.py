"""Where tokens lie in a text: entries for the rows of token_embed, truncated texts, and classified pairs."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny import SENTENCES, Layout, Normalize, Pooling, write_checkpoint
from tests.tiny.heads import write_pylate, write_stanford

from millpond import Engine, Pair, TokenSpans
from millpond.errors import InvalidRequestError

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


@pytest.fixture
def named(checkpoint_of: Callable[..., Path], engine_of: Callable[..., Engine]) -> Callable[[str], Engine]:
    """The engine of a name."""

    def load(name: str) -> Engine:
        kind, _, family = name.partition(" ")
        layout: dict[str, Any] = {"modules": (Pooling(), Normalize())}
        if kind == "stanford":
            return engine_of(checkpoint_of(write_stanford, family or "bert"))
        if kind == "pylate":
            return engine_of(write_pylate)
        if kind == "plain":
            return engine_of(checkpoint_of(family), convert="embed")
        if kind == "prompted":
            layout["prompts"] = {"query": "Query: ", "document": "Title of it. "}
        else:
            layout["do_lower_case"] = True
        return engine_of(checkpoint_of(family or "bert", sentence_transformers=Layout(**layout)))

    return load


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
def test_every_row_of_token_embed_has_an_entry_and_its_token_is_the_text_there(named, name, role, truncate):
    engine = named(name)
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


def test_the_tokens_of_a_colbert_query_are_marker_text_and_expansion(named):
    engine = named("stanford")
    (entry,) = engine.token_spans(["The pond, water."], role="query")
    assert entry.tokens[:2] == ("[CLS]", "[unused0]")
    assert len(entry) == 12 and entry.tokens[-1] == "[MASK]"
    last = entry.tokens.index("[SEP]")
    assert not entry.offsets[[0, 1, *range(last, 12)]].any()
    read = ["The pond, still."[start:end] for start, end in entry.offsets[2:last]]
    assert read == ["The", "pond", ",", "still", "."]


@pytest.mark.torch
@pytest.mark.parametrize("name", ["plain bert", "plain roberta", "plain xlm-roberta", "plain llama"])
def test_spans_are_those_that_transformers_tokenizer_reports(named, name):
    engine = named(name)
    text = "The old mill. " + TEXTS[5]
    (entry,) = engine.token_spans([text])
    expected = engine.tokenizer(text, return_offsets_mapping=True)
    offsets = [tuple(span) if span[0] < span[1] else (0, 0) for span in expected["offset_mapping"]]
    assert list(entry.tokens) == engine.tokenizer.convert_ids_to_tokens(expected["input_ids"])
    assert [tuple(span) for span in entry.offsets.tolist()] == offsets


def test_bytes_of_one_character_have_its_span(named):
    (entry,) = named("plain qwen2").token_spans(["a🙂b"])
    spans = [tuple(span) for span in entry.offsets.tolist()]
    assert sorted({*spans} - {(0, 0)}) == [(0, 1), (1, 2), (2, 3)]
    assert spans.count((1, 2)) > 1


@pytest.mark.parametrize(("family", "lowercase"), [("bert", False), ("bert", True), ("qwen2", False)])
def test_a_truncated_text_has_the_requested_number_of_tokens(tmp_path: Path, family: str, lowercase: bool) -> None:
    with Engine(write_checkpoint(tmp_path / "model", family, lowercase=lowercase), dtype="float32") as engine:
        texts = [SENTENCES[0], "İSTANBUL: ein Teich, une étang, 池。", "", "a"]
        for tokens in (1, 3, 5, 500):
            kept = engine.truncate_texts(texts, tokens)
            for text, part in zip(texts, kept, strict=True):
                (whole,), (ids,) = (engine.tokenize([each], special_tokens=False) for each in (text, part))
                assert text.startswith(part)
                assert len(ids) <= tokens
                assert ids == whole[: len(ids)] or text == texts[1]  # a token may be part of a character
                assert part == text or len(whole) > tokens
        assert engine.truncate_texts(texts, 3)[0] != texts[0]
        for wrong in (0, -1, True, 1.5):
            with pytest.raises(InvalidRequestError, match="tokens="):
                engine.truncate_texts(texts, wrong)


def test_an_oversize_text_is_truncated_like_a_long_one(tmp_path: Path) -> None:
    with Engine(write_checkpoint(tmp_path / "model"), dtype="float32") as engine:
        text = " ".join(SENTENCES)
        kept = engine.truncate_texts([text, text + " " + text * (300_000 // len(text)), text], 7)
        assert kept[0] == kept[1] == kept[2] != text


@pytest.mark.torch
def test_pairs_are_classified_as_transformers_does(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = write_checkpoint(tmp_path / "model", "bert", head="SequenceClassification")
    pairs = [Pair(SENTENCES[0], SENTENCES[1]), Pair("a", "b c")]
    tokenizer, model = (kind.from_pretrained(folder) for kind in (AutoTokenizer, AutoModelForSequenceClassification))
    with Engine(folder, dtype="float32") as engine, torch.no_grad():
        found = engine.classify([*pairs, SENTENCES[0]]).probs  # type: ignore[list-item]  # pairs are let through
        for pair, probs in zip(pairs, found, strict=False):
            logits = model(**tokenizer(*pair, return_tensors="pt")).logits[0]
            np.testing.assert_allclose(probs, logits.softmax(-1).numpy(), atol=1e-5)
        np.testing.assert_allclose(found[2], engine.classify([SENTENCES[0]]).probs[0], atol=1e-6)
        assert not np.allclose(found[0], found[2], atol=1e-4)
    with (
        Engine(write_checkpoint(tmp_path / "embedder"), dtype="float32") as engine,
        pytest.raises(InvalidRequestError, match="not classify"),
    ):
        engine.classify(pairs)  # type: ignore[arg-type]
