"""SentencePiece's files: read as its own library reads them, and built as transformers builds them."""

from __future__ import annotations

import json
import struct

import pytest
from tests.tiny import SENTENCES, write_checkpoint

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
        (b"version https://git-lfs.github.com", ""),
    ],
)
def test_a_file_that_is_none(tmp_path, content, problem):
    (tmp_path / "a.model").write_bytes(content)
    with pytest.raises(ModelLoadError, match=rf"a\.model is no model of SentencePiece: .*{problem}"):
        read_sentencepiece(tmp_path / "a.model")


def test_merges_are_in_the_order_of_what_they_give():
    pieces = {piece: i for i, piece in enumerate(("a", "b", "c", "bc", "ab", "abc"))}
    assert merges_of(pieces) == [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")]


ROLE = {"special": True, "normalized": False, "lstrip": False, "rstrip": False, "single_word": False}
SETTINGS = (
    {},
    None,  # no files of settings
    {"add_bos_token": True, "add_eos_token": True},
    {"add_prefix_space": False, "keep_accents": True, "do_lower_case": False},
    {"legacy": True, "add_bos_token": True, "split_by_punct": True, "do_lower_case": True},
    {"additional_special_tokens": ["[Q]"]},
    {"added_tokens_decoder": {"5": {"content": "[NEW]", **ROLE}, "9000": {"content": "[MILL]", **ROLE}}},
)
KINDS = {
    "unigram": {},
    "bpe": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", "vocab_size": 600},
    "gemma": {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "vocab_size": 600,
        "pad_id": 0,
        "eos_id": 1,
        "bos_id": 2,
        "unk_id": 3,
        "user_defined_symbols": ["<mask>"],
        "pad_piece": "<pad>",
        "eos_piece": "<eos>",
        "bos_piece": "<bos>",
    },
    "albert": {
        "pad_id": 0,
        "unk_id": 1,
        "bos_id": -1,
        "eos_id": -1,
        "pad_piece": "<pad>",
        "control_symbols": ["[CLS]", "[SEP]"],
        "user_defined_symbols": ["[MASK]", "("],
    },
    "rembert": {
        "pad_id": 0,
        "unk_id": 1,
        "bos_id": -1,
        "eos_id": -1,
        "pad_piece": "<pad>",
        "control_symbols": ["[CLS]", "[SEP]", "[MASK]"],
    },
    "big-bird": {
        "pad_id": 0,
        "eos_id": 1,
        "unk_id": 100,
        "bos_id": 2,
        "pad_piece": "<pad>",
        "control_symbols": ["[SEP]", "[MASK]", "[CLS]"],
    },
    "deberta": {
        "pad_id": 0,
        "bos_id": 1,
        "eos_id": 2,
        "unk_id": 3,
        "pad_piece": "[PAD]",
        "bos_piece": "[CLS]",
        "eos_piece": "[SEP]",
        "unk_piece": "[UNK]",
    },
}


@pytest.mark.torch
@pytest.mark.contract
@pytest.mark.parametrize(
    ("family", "name", "kind"),
    [
        ("xlm-roberta", "sentencepiece.bpe.model", "unigram"),
        ("jina", "sentencepiece.bpe.model", "unigram"),
        ("camembert", "sentencepiece.bpe.model", "unigram"),
        ("albert", "spiece.model", "albert"),
        ("deberta-v2", "spm.model", "deberta"),
        ("gemma", "tokenizer.model", "gemma"),
        ("gemma2", "tokenizer.model", "bpe"),
        ("llama", "tokenizer.model", "bpe"),
        ("mistral", "tokenizer.model", "bpe"),
        ("internlm2", "tokenizer.model", "unigram"),
    ],
)
def test_what_transformers_builds_with_sentencepiece_s_library(family, name, kind, tmp_path):
    from tests.checkpoints.test_tokenizers import equals_transformers
    from transformers import AutoTokenizer

    sentencepiece = pytest.importorskip("sentencepiece")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(
        "\n".join([*SENTENCES * 5, "Café naïve résumé ﬁ ① 池塘 日本語 한국어 Überİ 1234567"]), encoding="utf-8"
    )
    options = {"vocab_size": 300, "hard_vocab_limit": False, "minloglevel": 2, **KINDS[kind]}
    sentencepiece.SentencePieceTrainer.train(input=str(corpus), model_prefix=str(tmp_path / "trained"), **options)
    compared = 0
    for number, settings in enumerate(SETTINGS):
        folder = write_checkpoint(tmp_path / str(number), family)
        (folder / "tokenizer.json").unlink()
        (folder / name).write_bytes((tmp_path / "trained.model").read_bytes())
        path = folder / "tokenizer_config.json"
        if settings is None:
            path.unlink()
            (folder / "special_tokens_map.json").unlink()
        else:
            path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
        try:
            AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except ValueError:
            continue
        equals_transformers(folder)
        compared += 1
    assert compared > 4


def test_a_damaged_file_is_named(tmp_path):
    folder = write_checkpoint(tmp_path / "model", "xlm-roberta")
    (folder / "tokenizer.json").unlink()
    (folder / "sentencepiece.bpe.model").write_bytes(b"version https://git-lfs")
    with pytest.raises(ModelLoadError, match="is no model of SentencePiece"):
        read_tokenizer(folder)


@pytest.mark.torch
@pytest.mark.contract
@pytest.mark.parametrize(("family", "name"), [("big-bird", "spiece.model"), ("rembert", "sentencepiece.model")])
def test_pieces_are_those_of_sentencepiece_s_library(family, name, tmp_path):
    """transformers 5 leaves their compiled normalization out, or takes another unknown piece."""
    sentencepiece = pytest.importorskip("sentencepiece")
    corpus = tmp_path / "corpus.txt"
    rare = "Café naïve résumé ﬁ ① 池塘 日本語 한국어 Überİ 1234567"
    corpus.write_text("\n".join([*SENTENCES * 5, rare]), encoding="utf-8")
    options = {"vocab_size": 300, "hard_vocab_limit": False, "minloglevel": 2, **KINDS[family]}
    sentencepiece.SentencePieceTrainer.train(input=str(corpus), model_prefix=str(tmp_path / "trained"), **options)
    folder = write_checkpoint(tmp_path / "model", family)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    (folder / name).write_bytes((tmp_path / "trained.model").read_bytes())
    library = sentencepiece.SentencePieceProcessor(model_file=str(folder / name))
    read = read_tokenizer(folder).backend
    for text in (*SENTENCES, rare, "two  spaces   and ☃"):
        expected = [library.piece_to_id("[CLS]"), *library.encode(text), library.piece_to_id("[SEP]")]
        assert read.encode(text).ids == expected
