"""SentencePiece's model files, read without its library: the pieces, and how texts are normalized.

A file is a message of protocol buffers: fields with a number and a type, of which only those named here are read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millpond.checkpoints.resolve import check_pointer
from millpond.errors import ModelLoadError

UNIGRAM, BPE = 1, 2
# Types of pieces that no text is split into, and that a text names.
CONTROL, USER_DEFINED = 3, 4
_NORMAL = 1


@dataclass(frozen=True, kw_only=True)
class SentencePieceModel:
    """The parts of a file that a tokenizer is built from."""

    pieces: tuple[tuple[str, float], ...]  # each with its score, by id
    added: tuple[tuple[str, bool], ...]  # pieces that a text names as they are, and whether they are special
    charsmap: bytes | None  # the compiled normalization; `None`: none
    prefixed: bool  # a text has a space before it
    tidy: bool  # a text has no spaces at its ends, and nowhere two of them
    kind: int  # `UNIGRAM` or `BPE`
    byte_fallback: bool  # unknown characters are split into their bytes
    unknown: int  # id of the unknown piece
    # The unknown piece and the ends of a text, by role; without those that are switched off
    roles: dict[str, str]


def read_sentencepiece(path: Path) -> SentencePieceModel:
    """The model in ``path``; raises ModelLoadError if it is none."""
    try:
        return _read(path.read_bytes())
    except (OSError, ValueError, IndexError, struct.error) as error:
        check_pointer(path)
        raise ModelLoadError(f"{path} is no model of SentencePiece: {error}; fetch it again") from error


def _read(data: bytes) -> SentencePieceModel:
    pieces, added = [], []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == 1:
            fields = dict(_fields(value))
            piece = str(fields.get(1, b""), "utf-8")
            pieces.append((piece, fields.get(2, 0.0)))
            kind = fields.get(3, _NORMAL)
            if kind in (CONTROL, USER_DEFINED):
                added.append((piece, kind == CONTROL))
        elif number == 2:
            trainer = dict(_fields(value))
        elif number == 3:
            normalizer = dict(_fields(value))
    if not pieces:
        raise ValueError("it has no pieces")
    kind = trainer.get(3, UNIGRAM)
    if kind not in (UNIGRAM, BPE):
        raise ValueError(f"its pieces are of kind {kind}; unigrams (1) and merged pairs (2) are read")
    if trainer.get(24, 0):
        raise ValueError("its words end with their space instead of beginning with it")
    roles = {"unk_token": (40, 0, 45, b"<unk>"), "bos_token": (41, 1, 46, b"<s>"), "eos_token": (42, 2, 47, b"</s>")}
    return SentencePieceModel(
        pieces=tuple(pieces),
        added=tuple(added),
        charsmap=normalizer.get(2) or None,
        prefixed=bool(normalizer.get(3, 1)),
        tidy=bool(normalizer.get(4, 1)),
        kind=kind,
        byte_fallback=bool(trainer.get(35, 0)),
        unknown=_signed(trainer.get(40, 0)),
        roles={
            role: str(trainer.get(text, default), "utf-8")
            for role, (number, first, text, default) in roles.items()
            if _signed(trainer.get(number, first)) >= 0
        },
    )


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message: integers as they are written, float numbers, and bytes."""
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        form = key & 7
        if form == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
        elif form == 2:
            length, at = _varint(data, at)
            if at + length > end:
                raise ValueError("it ends within a field")
            yield key >> 3, data[at : at + length]
            at += length
        elif form == 5:
            yield key >> 3, struct.unpack_from("<f", data, at)[0]
            at += 4
        elif form == 1:
            yield key >> 3, struct.unpack_from("<d", data, at)[0]
            at += 8
        else:
            raise ValueError(f"it has a field of form {form}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The integer at ``at``, seven bits a byte, and where it ends."""
    value = data[at]
    if value < 128:
        return value, at + 1
    value, shift = value & 127, 7
    while True:
        at += 1
        byte = data[at]
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at + 1
        shift += 7
        if shift > 63:
            raise ValueError("it has an integer of more than 64 bits")


def _signed(value: int) -> int:
    """A negative integer is written as its complement to 2^64."""
    return value - (1 << 64) if value >> 63 else value


def merges_of(pieces: dict[str, int]) -> list[tuple[str, str]]:
    """The pairs of pieces whose union is a piece, in the order in which they are merged: by the id of the union."""
    merges = []
    for piece, number in pieces.items():
        for cut in range(1, len(piece)):
            left, right = pieces.get(piece[:cut]), pieces.get(piece[cut:])
            if left is not None and right is not None:
                merges.append((number, cut, left, right, piece))
    merges.sort()
    return [(piece[:cut], piece[cut:]) for _, cut, _, _, piece in merges]
