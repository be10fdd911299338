"""A GGUF's vocabulary, written as the files that its tokenizer had before the conversion."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from millpond.checkpoints.gguf.file import GgufFile
from millpond.errors import ModelLoadError, UnsupportedArchitectureError

# Types of tokens.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "▁"
# Special tokens by role: the keys of their ids; the first that the file has counts.
_ROLES = {
    "cls_token": ("cls_token_id", "bos_token_id"),
    "sep_token": ("seperator_token_id", "eos_token_id"),  # spelt so in the format
    "bos_token": ("bos_token_id",),
    "eos_token": ("eos_token_id",),
    "unk_token": ("unknown_token_id",),
    "pad_token": ("padding_token_id",),
    "mask_token": ("mask_token_id",),
}
_AGAIN = "convert it again, or name the checkpoint that it was converted from"
_WORDPIECE_ROLES = ("cls_token", "sep_token", "unk_token", "pad_token", "mask_token")
_BPE_ROLES = ("bos_token", "eos_token", "pad_token")


def write_vocabulary(file: GgufFile, folder: Path, *, limit: int) -> None:
    """Write the tokenizer's files into ``folder``.

    Raises:
        UnsupportedArchitectureError: Its tokenizer is none of those that its architecture's checkpoints have.
    """
    kind = _of(file, "model")
    if kind != file.row.vocabulary:
        raise UnsupportedArchitectureError(
            f"{file.path} has a tokenizer {kind!r}, and millpond reads {file.name} with {file.row.vocabulary!r} only; "
            "name the checkpoint that it was converted from"
        )
    tokens = _of(file, "tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelLoadError(f"{file.path} has no vocabulary; {_AGAIN}")
    settings = {"bert": _wordpiece, "gpt2": _byte_pairs, "llama": _sentencepiece}[kind](file, tokens, folder)
    content = json.dumps({**settings, "model_max_length": limit}, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(content, encoding="utf-8")


def _wordpiece(file: GgufFile, tokens: list[str], folder: Path) -> dict[str, Any]:
    """The converter puts a space before the beginnings of words and takes ## from the other pieces."""
    special = {token for token, kind in zip(tokens, _types(file, tokens), strict=True) if kind in (_CONTROL, _UNKNOWN)}
    words = [
        token if token in special or (token.startswith("[") and token.endswith("]"))
        else token.removeprefix(_SPACE) if token.startswith(_SPACE)
        else f"##{token}"
        for token in tokens
    ]  # fmt: skip
    (folder / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    # The file does not say whether texts are folded to lower case; a vocabulary of lower case has no other letters.
    plain = (word for word in words if not (word.startswith("[") and word.endswith("]")))
    cased = any(word != word.lower() for word in plain)
    roles = _roles(file, tokens, _WORDPIECE_ROLES)
    return {"tokenizer_class": "BertTokenizer", "do_lower_case": not cased, **roles}


def _byte_pairs(file: GgufFile, tokens: list[str], folder: Path) -> dict[str, Any]:
    words = _of(file, "pre")
    if words != "qwen2":
        raise UnsupportedArchitectureError(
            f"{file.path} splits words by {words!r}, and millpond reads those split by 'qwen2'; name the checkpoint "
            "that it was converted from"
        )
    if not _of(file, "merges"):
        raise ModelLoadError(f"{file.path} has no tokenizer.ggml.merges, by which words are split; {_AGAIN}")
    types = _types(file, tokens)
    ids = {token: i for i, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(ids, ensure_ascii=False), encoding="utf-8")
    merges = "\n".join(("#version: 0.2", *_of(file, "merges"), ""))
    (folder / "merges.txt").write_text(merges, encoding="utf-8")
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = {
        str(i): {"content": token, "special": kind == _CONTROL, **flags}
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    }
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "added_tokens_decoder": added,
        "add_bos_token": bool(_of(file, "add_bos_token")),
        # The embedders read the token that ends a text, which files of old converters do not ask for.
        "add_eos_token": _of(file, "add_eos_token") is not False,
        **_roles(file, tokens, _BPE_ROLES),
    }


def _sentencepiece(file: GgufFile, tokens: list[str], folder: Path) -> dict[str, Any]:
    """A model of SentencePiece that merges pairs, in its own format."""
    scores, types = _of(file, "scores") or [0.0] * len(tokens), _types(file, tokens)
    pieces = b"".join(
        _field(1, _field(1, token.encode()) + b"\x15" + struct.pack("<f", score) + b"\x18" + bytes([kind]))
        for token, score, kind in zip(tokens, scores, types, strict=True)
    )
    trainer = b"\x18\x02" + b"\x98\x02\x01"  # it merges pairs (field 3), and falls back to bytes (field 35)
    # Its normalizer puts a space before a text (field 3), and drops spaces at its ends and beside others (field 4).
    before, fewer = _of(file, "add_space_prefix") is not False, bool(_of(file, "remove_extra_whitespaces"))
    normalizer = b"\x18" + bytes([before]) + b"\x20" + bytes([fewer])
    (folder / "tokenizer.model").write_bytes(pieces + _field(2, trainer) + _field(3, normalizer))
    return {
        "tokenizer_class": "GemmaTokenizer",
        "add_bos_token": _of(file, "add_bos_token") is not False,
        "add_eos_token": bool(_of(file, "add_eos_token")),
        **_roles(file, tokens, (*_BPE_ROLES, "unk_token", "mask_token")),
    }


def _field(number: int, content: bytes) -> bytes:
    """A field of bytes in a message of protocol buffers."""
    length, size = [], len(content)
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + content


def _types(file: GgufFile, tokens: list[str]) -> list[int]:
    return _of(file, "token_type") or [_NORMAL] * len(tokens)


def _roles(file: GgufFile, tokens: list[str], roles: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for role in roles:
        number = next((value for key in _ROLES[role] if (value := _of(file, key)) is not None), None)
        if number is not None and number < len(tokens):
            found[role] = tokens[number]
    return found


def _of(file: GgufFile, key: str) -> Any:
    return file.metadata.get(f"tokenizer.ggml.{key}")
