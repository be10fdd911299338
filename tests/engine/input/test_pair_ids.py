"""Pairs in C++ have the ids, types and places of ``tokenizers``; templates of another kind are left to it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.engine.input import scripts
from tests.tiny.tokenizers import KINDS, write_tokenizer
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from millpond.engine.tokenize import pair_ids
from millpond.engine.tokenize.pair_ids import PairTemplate, of_encoding
from millpond.engine.tokenize.text_tokenizer import TextTokenizer
from millpond.native.library import portable

pytestmark = pytest.mark.skipif(portable() is None, reason="the kernels are not built")

_IN_CPP = ("bert", "mpnet", "roberta", "deberta-v1", "gpt2", "qwen")


def _tokenizer(folder: Path, name: str) -> TextTokenizer:
    write_tokenizer(folder, name, limit=None)
    return TextTokenizer.load(folder, lower=False)


@pytest.mark.parametrize("name", _IN_CPP)
def test_pairs_are_those_of_tokenizers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, texts = _tokenizer(tmp_path, name), ["", "a", "[MASK] a", "The mill.", *scripts.texts(196, seed=6)]
    pairs = list(zip(texts[::2], texts[1::2], strict=True))
    expected = [of_encoding(encoding) for encoding in tokenizer._backend.encode_batch(pairs)]
    left: list[object] = []
    monkeypatch.setattr(pair_ids, "of_encoding", lambda encoding: (left.append(encoding), of_encoding(encoding))[1])
    for found, pair in zip(tokenizer.encode_pairs(pairs), expected, strict=True):
        assert found.ids.tolist() == pair.ids.tolist() and found.type_ids.tolist() == pair.type_ids.tolist()
        assert all(np.array_equal(*places) for places in zip(found.places(), pair.places(), strict=True))
    assert len(left) < 80
    assert any(pair.places()[1][:1].tolist() not in ([], [1]) for pair in expected)


@pytest.mark.parametrize("template", ["$B [SEP] $A", "$A [SEP] $B $A", "[CLS] $A [SEP]:1 $B:1 [SEP]:1"])
def test_other_templates_are_left(template: str, tmp_path: Path) -> None:
    backend: Tokenizer = _tokenizer(tmp_path, "bert")._backend
    assert PairTemplate.of(backend, prefix=1, suffix=1) is not None
    specials = [(token, backend.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    backend.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", pair=template, special_tokens=specials)
    assert (PairTemplate.of(backend, prefix=1, suffix=1) is None) == template.startswith("$")
    assert set(_IN_CPP) <= set(KINDS)
