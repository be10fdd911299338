"""Byte-level BPE in C++ gives the ids of ``tokenizers`` for texts of all scripts, with each pattern of words."""

from __future__ import annotations

import inspect
import json
import random
import textwrap
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.engine.input import scripts
from tests.tiny.tokenizers import SENTENCES
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from millpond.engine.tokenize.byte_pairs import PATTERNS, BytePairs
from millpond.engine.tokenize.text_tokenizer import TextTokenizer
from millpond.native.library import portable

pytestmark = pytest.mark.skipif(portable() is None, reason="the kernels are not built")

_SLOW = [pytest.mark.slow, pytest.mark.timeout(3600)]
_GPT2, _QWEN, _LLAMA, _ACCENTS = range(4)
_SPECIALS = ("<s>", "</s>", "<|end|>", "<|end|>|>")


@cache
def _model() -> dict[str, Any]:
    """A vocabulary with its merges, trained on Python, English and texts of all scripts."""
    sources = [inspect.getsource(module) for module in (inspect, json, random, textwrap)]
    tokenizer = Tokenizer(models.BPE())
    # Merges go across letters, numbers and signs, so that words which end elsewhere have other tokens.
    split = pre_tokenizers.Split(Regex(r"\s*\S+|\s+"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4000, initial_alphabet=alphabet, show_progress=False)
    mixed = ["1234567 IT'S it's कि\u094d\u200dष a\n\nb  c"] * 300
    tokenizer.train_from_iterator([*sources, *SENTENCES, *mixed, *scripts.texts(1500, seed=77)], trainer)
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    # Words that no merges lead to.
    model["vocab"] |= {
        word: len(model["vocab"]) + i for i, word in enumerate(("Ġreservoir", "drought", "ĠĠĠĠx", "qzx"))
    }
    return model


def _words(pattern: int, *, spaced: bool = False) -> Any:
    if PATTERNS[pattern] is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=spaced)
    split = pre_tokenizers.Split(Regex(PATTERNS[pattern]), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _tokenizer(pattern: int, *, spaced: bool = False, composed: bool = False, **options: Any) -> Tokenizer:
    model = _model()
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(models.BPE(model["vocab"], merges, **options))
    tokenizer.pre_tokenizer = _words(pattern, spaced=spaced)
    if composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(list(_SPECIALS))
    return tokenizer


def _with_ends() -> Tokenizer:
    tokenizer = _tokenizer(_GPT2)
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    ends = [(token, tokenizer.token_to_id(token)) for token in ("</s>", "<s>")]
    tokenizer.post_processor = processors.RobertaProcessing(*ends, trim_offsets=True, add_prefix_space=False)
    return tokenizer


def _with_runs() -> Tokenizer:
    tokenizer = _tokenizer(_GPT2, composed=True)
    tokenizer.add_tokens([AddedToken(" " * length, normalized=True) for length in range(2, 9)])
    tokenizer.add_tokens([AddedToken("|||", normalized=True), AddedToken("\u3042\u304b", normalized=False)])
    return tokenizer


_TOKENIZERS: dict[str, Any] = {
    "gpt2": lambda: _tokenizer(_GPT2),
    "spaced": lambda: _tokenizer(_GPT2, spaced=True),
    "roberta": _with_ends,
    "modernbert": _with_runs,
    "qwen3": lambda: _tokenizer(_QWEN, composed=True),
    "llama3": lambda: _tokenizer(_LLAMA, ignore_merges=True),
    "qwen3.5": lambda: _tokenizer(_ACCENTS, composed=True),
}
_INSERTED = (*_SPECIALS, "<mask>", "|||", " " * 5, "あか", "<|end", "reservoir", " reservoir", "drought", "qzx")


def _texts(count: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    made = scripts.texts(count, seed)
    for i in range(0, count, 3):
        place = chance.randrange(len(made[i]) + 1)
        made[i] = made[i][:place] + chance.choice(_INSERTED) + chance.choice(("", " ", "a")) + made[i][place:]
    return [
        *made,
        *SENTENCES,
        "",
        " ",
        "a" * 5000,
        "ab" * 3000,
        "水車" * 900,
        " " * 700,
        "\n" * 300,
        "'" * 99,
        "1" * 50,
    ]


def _ends(backend: Tokenizer) -> int:
    return 1 if backend.post_processor is not None else 0


def _native(backend: Tokenizer, file: Path | None = None) -> BytePairs | None:
    return BytePairs.of(backend, prefix=_ends(backend), suffix=_ends(backend), file=file)


def _expected(backend: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in backend.encode_batch_fast(texts)]


@pytest.mark.parametrize("name", _TOKENIZERS)
@pytest.mark.parametrize("rounds", [1, pytest.param(67, marks=_SLOW)])
def test_ids_are_those_of_tokenizers(name: str, rounds: int) -> None:
    backend = _TOKENIZERS[name]()
    native, whole = _native(backend), TextTokenizer(backend, lower=False, limit=None, placeholder=0)
    assert native is not None
    for seed in range(rounds):
        texts = _texts(1500, seed=seed)
        expected = _expected(backend, texts)
        for _ in range(2):  # the second time it knows which tokens are what their merges yield
            found = native.split(texts)
            split = {i: ids.tolist() for i, ids in enumerate(found) if ids is not None}
            assert split == {i: expected[i] for i in split}
        left = [text for text, ids in zip(texts, found, strict=True) if ids is None]
        assert len(left) < 0.5 * len(texts)
        assert bool(left) == (backend.normalizer is not None or name == "roberta")
        ones = [native.one(text) for text in texts]
        assert all(one is None or one.tolist() == expected[i] for i, one in enumerate(ones))
        kept = whole.encode(texts, prompt="", limit=10_000, truncate="end", index_of=int)
        assert [item.ids.tolist() for item in kept] == [ids or [0] for ids in expected]


@pytest.mark.parametrize(
    "name", ["qwen3", *(pytest.param(name, marks=_SLOW) for name in _TOKENIZERS if name != "qwen3")]
)
def test_every_character(name: str) -> None:
    backend = _TOKENIZERS[name]()
    patterns = [" {0}1"] if name == "qwen3" else ["a{0} {0} {0}B{0}1\n{0}", "'{0}", "'{0}e{0} 'l{0}", "e\u0345{0}"]
    for pattern in patterns:
        texts = scripts.every_character(pattern, per_text=60, thin=name == "qwen3")
        native, expected = _native(backend), _expected(backend, texts)
        assert native is not None
        found = native.split(texts)
        # Those that NFC may change are together, and all behind a mark.
        assert sum(ids is not None for ids in found) > (0.8 if "\u0345" not in pattern else 0.5) * len(texts)
        assert all(ids is None or ids.tolist() == expected[i] for i, ids in enumerate(found))


def test_patterns_differ() -> None:
    texts = ["1234567", "IT'S it's '\u017f", "कि\u094d\u200dष", "a\n\nb  c"]
    split = []
    for pattern in (_GPT2, _QWEN, _LLAMA, _ACCENTS):
        native = _native(_tokenizer(pattern))
        assert native is not None
        split.append([ids is not None and ids.tolist() for ids in native.split(texts)])
    assert all(one != other for i, one in enumerate(split) for other in split[:i])


def test_marks_in_another_order_are_left() -> None:
    native, plain = _native(_tokenizer(_QWEN, composed=True)), _native(_tokenizer(_QWEN))
    left = ["\u0591\u05b0", "\u1100\u1161\u11a8", "e\u0301", "\u212b", "\ud800"]
    kept = ["\u05b0\u0591", "\uac01", "\u00e9", "q\u0591a\u05b0", "\u0915\u094d"]
    assert native is not None and plain is not None
    assert all(ids is None for ids in native.split(left)) and all(ids is not None for ids in native.split(kept))
    assert all(ids is not None for ids in plain.split([*left[:-1], *kept]))
    assert native.one("\ud800") is None


@pytest.mark.parametrize("escaped", [False, True])
def test_files(tmp_path: Path, escaped: bool) -> None:
    backend, file = _TOKENIZERS["llama3"](), tmp_path / "tokenizer.json"
    held = json.loads(backend.to_str())
    if escaped:  # the keys in another order, and merges as they were written once
        held["model"]["merges"] = [" ".join(pair) for pair in held["model"]["merges"]]
        held["model"] = dict(reversed(held["model"].items()))
        held = {"model": held.pop("model"), **held}
    file.write_text(json.dumps(held, ensure_ascii=escaped, indent=2 if escaped else None), encoding="utf-8")
    backend, texts = Tokenizer.from_file(str(file)), _texts(300, seed=3)
    native = _native(backend, file)
    assert native is not None
    assert [ids is not None and ids.tolist() for ids in native.split(texts)] == _expected(backend, texts)
    file.write_text(file.read_text(encoding="utf-8")[:20_000], encoding="utf-8")
    assert _native(backend, file) is None


def test_threads_share_a_tokenizer() -> None:
    backend, texts = _TOKENIZERS["gpt2"](), _texts(300, seed=4)
    native, expected = _native(backend), _expected(backend, texts)
    assert native is not None
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda _: native.split(texts), range(32)):
            assert [ids is not None and ids.tolist() for ids in found] == expected


def _changed(change: str) -> Tokenizer:
    options = {"suffix": {"end_of_word_suffix": "x"}, "dropout": {"dropout": 0.1}}.get(change, {})
    backend = _tokenizer(_QWEN, **options)
    if change == "another pattern":
        split = pre_tokenizers.Split(Regex(r"\p{N}{1,2}|\P{N}+"), behavior="isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(use_regex=False)])
    elif change == "two patterns":
        backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel()])
    elif change == "no bytes":
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
    elif change == "a normalizer":
        backend.normalizer = normalizers.Lowercase()
    elif change == "a missing byte":
        backend.model = models.BPE({"a": 0, "b": 1}, [])
    elif change == "split specials":
        backend.encode_special_tokens = True
    return backend


@pytest.mark.parametrize(
    "change",
    "another pattern,two patterns,no bytes,a normalizer,a missing byte,split specials,suffix,dropout,none".split(","),
)
def test_other_parts_are_left_to_tokenizers(change: str) -> None:
    assert (_native(_changed(change)) is not None) == (change == "none")
