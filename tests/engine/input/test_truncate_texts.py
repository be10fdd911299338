"""Texts cut to a number of tokens, and pairs that are classified."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.tiny import SENTENCES, write_checkpoint

from millpond import Engine, Pair
from millpond.errors import InvalidRequestError


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


def test_an_oversize_text_is_truncated_like_a_long_one(tmp_path: Path) -> None:
    with Engine(write_checkpoint(tmp_path / "model"), dtype="float32") as engine:
        text = " ".join(SENTENCES)
        kept = engine.truncate_texts([text, text + " " + text * (300_000 // len(text)), text], 7)
        assert kept[0] == kept[1] == kept[2] != text


@pytest.mark.parametrize("tokens", [0, -1, True, 1.5])
def test_the_number_of_tokens_is_a_positive_int(tmp_path: Path, tokens: int) -> None:
    with (
        Engine(write_checkpoint(tmp_path / "model"), dtype="float32") as engine,
        pytest.raises(InvalidRequestError, match="tokens="),
    ):
        engine.truncate_texts(["a"], tokens)


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
