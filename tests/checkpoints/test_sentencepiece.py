"""SentencePiece's files: read, and texts split as its own library splits them, in the conventions of the families."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import struct
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.tiny import SENTENCES, write_checkpoint
from tokenizers.normalizers import Prepend, Sequence

from millpond.checkpoints.tokenizers.read import read_tokenizer
from millpond.checkpoints.tokenizers.sentencepiece import BPE, merges_of, read_sentencepiece
from millpond.errors import ModelLoadError


def field(number: int, value: int | float | bytes) -> bytes:
    """A field of a message of protocol buffers."""
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value % (1 << 64))
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def piece(text: str, score: float, kind: int | None = None) -> bytes:
    return field(1, field(1, text.encode()) + field(2, score) + (b"" if kind is None else field(3, kind)))


PIECES = b"".join(
    (piece("<unk>", 0.0, 2), piece("<s>", 0.0, 3), piece("[Q]", 0.0, 4), piece("▁é", -1.5), piece("x" * 200, -2.0))
)
TRAINER = field(3, 2) + field(35, 1) + field(40, 0) + field(41, 1) + field(42, -1) + field(46, b"<begin>")


def test_the_parts_of_a_file(tmp_path):
    path = tmp_path / "a.model"
    path.write_bytes(PIECES + field(2, TRAINER) + field(3, field(1, b"nfkc") + field(2, b"\0\1")) + field(9, 7))
    model = read_sentencepiece(path)
    assert model.pieces == (("<unk>", 0), ("<s>", 0), ("[Q]", 0), ("▁é", -1.5), ("x" * 200, -2))
    assert model.added == (("<s>", True), ("[Q]", False))
    assert (model.kind, model.byte_fallback, model.unknown, model.charsmap) == (BPE, True, 0, b"\0\1")
    assert model.roles == {"unk_token": "<unk>", "bos_token": "<begin>"}  # the end is switched off
    path.write_bytes(PIECES)
    model = read_sentencepiece(path)
    assert (model.kind, model.charsmap, model.roles["eos_token"]) == (1, None, "</s>")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "no pieces"),
        (PIECES[:-3], "within a field"),
        (b"\x0b", "form 3"),
        (b"\x80", ""),
        (b"\xff" * 12, "more than 64 bits"),
        (PIECES + field(2, field(3, 4)), "kind 4"),
        (field(1, field(1, b"\xff")), "utf-8"),
        (b"<!DOCTYPE html>", ""),
    ],
)
def test_a_file_that_is_none(tmp_path, content, problem):
    (tmp_path / "a.model").write_bytes(content)
    with pytest.raises(ModelLoadError, match=rf"a\.model is no model of SentencePiece: .*{problem}"):
        read_sentencepiece(tmp_path / "a.model")


def test_merges_are_in_the_order_of_what_they_give():
    pieces = {piece: i for i, piece in enumerate(("a", "b", "c", "bc", "ab", "abc"))}
    assert merges_of(pieces) == [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")]


# Of each family: the file's name, its pieces' kind, the settings, and the ids around a text.
Around = Callable[[list[int]], list[int]]
UNKNOWN, CONTROL, BYTE = 2, 3, 6


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family's file, and what it does with a text's pieces."""

    name: str
    first: tuple[tuple[str, int], ...]  # the first pieces, with their types
    unknown: int  # among them
    around: Around
    merged: bool = False
    tidy: bool = True
    prefixed: bool = True
    fold: Callable[[str], str] = str


def albert(text: str) -> str:
    text = " ".join(text.split()).replace("``", '"').replace("''", '"')
    return "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c)).lower()


BRACKETS = (("[PAD]", CONTROL), ("[CLS]", CONTROL), ("[SEP]", CONTROL), ("[UNK]", UNKNOWN))
LLAMA = (("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL))
GEMMA = (("<pad>", CONTROL), ("<eos>", CONTROL), ("<bos>", CONTROL), ("<unk>", UNKNOWN))
UNIGRAMS = {
    "xlm-roberta": Family(
        name="sentencepiece.bpe.model",
        first=LLAMA,
        unknown=0,
        around=lambda ids: [0, *(3 if i == 0 else i + 1 for i in ids), 2],
    ),
    "albert": Family(
        name="spiece.model",
        first=(("<pad>", CONTROL), ("<unk>", UNKNOWN), ("[CLS]", CONTROL), ("[SEP]", CONTROL), ("[MASK]", CONTROL)),
        unknown=1,
        around=lambda ids: [2, *ids, 3],
        fold=albert,
    ),
    "rembert": Family(
        name="sentencepiece.model",
        first=(("<pad>", CONTROL), ("[CLS]", CONTROL), ("<unk>", UNKNOWN), ("[SEP]", CONTROL), ("[MASK]", CONTROL)),
        unknown=2,
        around=lambda ids: [1, *ids, 3],
    ),
    "big_bird": Family(
        name="spiece.model",
        first=(("<pad>", CONTROL), ("[SEP]", CONTROL), ("[CLS]", CONTROL), ("<unk>", UNKNOWN), ("[MASK]", CONTROL)),
        unknown=3,
        around=lambda ids: [2, *ids, 1],
    ),
    "t5": Family(
        name="spiece.model",
        first=(("<pad>", CONTROL), ("</s>", CONTROL), ("<unk>", UNKNOWN)),
        unknown=2,
        around=lambda ids: [*ids, 1],
    ),
    "deberta-v2": Family(name="spm.model", first=BRACKETS, unknown=3, around=lambda ids: [1, *ids, 2]),
}
MERGED = {"merged": True, "tidy": False, "name": "tokenizer.model"}
FAMILIES = {
    **UNIGRAMS,
    "xlm-roberta-xl": UNIGRAMS["xlm-roberta"],
    "mt5": UNIGRAMS["t5"],
    "llama": Family(first=LLAMA, unknown=0, around=lambda ids: [1, *ids], **MERGED),
    "mistral": Family(first=LLAMA, unknown=0, around=lambda ids: [1, *ids], **MERGED),
    "internlm2": Family(first=LLAMA, unknown=0, around=lambda ids: [1, *ids], **MERGED),
    "gemma": Family(first=GEMMA, unknown=3, around=lambda ids: [2, *ids], prefixed=False, **MERGED),
}
STRANGE = (
    "",
    " ",
    "  two  spaces ",
    "Ünïcode é 池塘",
    "▁x ▁",
    "wheel, 1824, 3,",
    "``quoted'' text",
    "a\tb\n c ",
    "x" * 50,
)


@cache
def vocabulary(family: Family) -> list[tuple[str, float, int]]:
    """Pieces with their scores and types."""
    first = [(text, 0.0, kind) for text, kind in family.first]
    words = Counter(part for sentence in SENTENCES for part in ("▁" + sentence.replace(" ", " ▁")).split())
    if not family.merged:
        pieces = Counter(word[at : at + n] for word in words for n in range(1, 6) for at in range(len(word) - n + 1))
        letters = sorted(piece for piece in pieces if len(piece) == 1)
        longer = [piece for piece, _ in sorted(pieces.items(), key=lambda item: (-item[1], item[0])) if len(piece) > 1]
        scored = [(piece, -9.0) for piece in letters] + [
            (piece, -3.0 - rank / 64) for rank, piece in enumerate([*longer[:200], "4,", "24,"])
        ]
        return first + [(piece, score, 1) for piece, score in scored]
    split = [list(word) for word in sorted(words)]
    merged: list[str] = []
    for _ in range(120):
        pairs = Counter(pair for word in split for pair in itertools.pairwise(word))
        left, right = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merged.append(left + right)
        for word in split:
            at = 0
            while at + 1 < len(word):
                if (word[at], word[at + 1]) == (left, right):
                    word[at : at + 2] = [left + right]
                at += 1
    letters = sorted({letter for word in words for letter in word})
    both = list(dict.fromkeys([*merged, *letters]))
    fallback = [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    return first + fallback + [(piece, -float(rank), 1) for rank, piece in enumerate(both)]


def segmented(text: str, family: Family) -> list[int]:
    """The ids of a text's pieces, by what SentencePiece's paper and its library's documentation say."""
    pieces = vocabulary(family)
    scores = {piece: (score, number) for number, (piece, score, kind) in enumerate(pieces) if kind == 1}
    text = family.fold(text)
    if family.tidy:
        text = re.sub(" {2,}", " ", text.strip(" "))
    text = ("▁" + text if text and family.prefixed else text).replace(" ", "▁")
    text = text.rstrip("▁") if family.tidy else text
    if family.merged:
        parts = list(text)
        while True:
            known = [(-scores[a + b][0], at) for at, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
            if not known:
                break
            _, at = min(known)
            parts[at : at + 2] = ["".join(parts[at : at + 2])]
        start = len(family.first)
        return [
            number
            for part in parts
            for number in ([scores[part][1]] if part in scores else [start + byte for byte in part.encode()])
        ]
    worst = min(score for score, _ in scores.values()) - 10  # of an unknown character
    best: list[tuple[float, list[int]]] = [(0.0, [])]
    for end in range(1, len(text) + 1):
        ways = []
        for begin in range(max(0, end - 8), end):
            piece = text[begin:end]
            if piece in scores:
                score, number = scores[piece]
                comma = family.fold is albert and piece[-1] == "," and piece[-2:-1].isdigit()
                ways.append((best[begin][0] + score - 100 * comma, [*best[begin][1], number]))
            elif len(piece) == 1:
                ways.append((best[begin][0] + worst, [*best[begin][1], family.unknown]))
        best.append(max(ways, key=lambda way: way[0]))
    found = best[-1][1]  # neighbouring unknown characters are one token
    return [n for at, n in enumerate(found) if n != family.unknown or found[at - 1 : at] != [n]]


def write_pieces(folder: Path, model_type: str, **settings: Any) -> Family:
    """Write a family's folder without tokenizer.json."""
    family = FAMILIES[model_type]
    folder.mkdir(exist_ok=True)
    content = b"".join(piece(text, score, None if kind == 1 else kind) for text, score, kind in vocabulary(family))
    trainer = field(3, BPE if family.merged else 1) + field(35, int(family.merged)) + field(40, family.unknown)
    normalizer = field(3, int(family.prefixed)) + field(4, int(family.tidy))
    (folder / family.name).write_bytes(content + field(2, trainer) + field(3, normalizer))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return family


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_folder_with_a_model_of_sentencepiece_alone(model_type, tmp_path):
    family = write_pieces(tmp_path / "model", model_type)
    backend = read_tokenizer(tmp_path / "model").backend
    texts = [*SENTENCES, *STRANGE]
    expected = [family.around(segmented(text, family)) for text in texts]
    assert [backend.encode(text).ids for text in texts] == expected
    assert all(len(ids) > 3 for ids in expected[: len(SENTENCES)])
    # The plausible mistake: without the space before a text.
    tokens = backend.normalizer
    backend.normalizer = Sequence([step for step in tokens if not isinstance(step, Prepend)])
    assert (backend.encode(SENTENCES[0]).ids == expected[0]) is not family.prefixed


def test_settings_beside_a_model_of_sentencepiece(tmp_path):
    """Ends, the first space, and tokens that have the ids of placeholders."""
    role = {"special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
    settings = {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": False,
        "add_eos_token": True,
        "add_prefix_space": False,
        "added_tokens_decoder": {"7": {"content": "[NEW]", **role}},
    }
    family = write_pieces(tmp_path / "model", "llama", **settings)
    backend = read_tokenizer(tmp_path / "model").backend
    unspaced = dataclasses.replace(family, prefixed=False)
    assert backend.encode(SENTENCES[0]).ids == [*segmented(SENTENCES[0], unspaced), 2]
    assert backend.encode("[NEW]").ids == [7, 2]


def test_the_file_s_name_may_be_another_class_s(tmp_path):
    family = write_pieces(tmp_path / "model", "xlm-roberta")
    expected = read_tokenizer(tmp_path / "model").backend.encode(SENTENCES[0]).ids
    (tmp_path / "model" / family.name).rename(tmp_path / "model" / "tokenizer.model")
    assert read_tokenizer(tmp_path / "model").backend.encode(SENTENCES[0]).ids == expected


def test_a_damaged_file_is_named(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "xlm-roberta")
    (folder / "tokenizer.json").unlink()
    (folder / "sentencepiece.bpe.model").write_bytes(b"<!DOCTYPE html>")
    with pytest.raises(ModelLoadError, match="is no model of SentencePiece"):
        read_tokenizer(folder)
