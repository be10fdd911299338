"""What a model file of SentencePiece becomes for each class of transformers: vocabulary, steps before it, ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors

from millpond.checkpoints.tokenizers.sentencepiece import UNIGRAM, SentencePieceModel

SPACE = "▁"  # SentencePiece's space
Pieces = list[tuple[str, float]]  # each with its score, by id


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a class makes its tokenizer from, besides the vocabulary."""

    settings: Mapping[str, Any]  # tokenizer_config.json
    roles: Mapping[str, str]  # special tokens by role
    pieces: SentencePieceModel | None = None  # the file of SentencePiece, where the vocabulary is its

    def get(self, name: str, default: Any) -> Any:
        """The value of a setting; null counts as absent."""
        value = self.settings.get(name)
        return default if value is None else value


def arrange(tokenizer: Tokenizer, setup: Setup, *, first: tuple[Any, ...] = (), apart: tuple[Any, ...] = ()) -> None:
    """The steps of SentencePiece's own library, by what its file says of them.

    ``first`` and ``apart``: steps of a class before those of normalization, and what splits a text besides spaces.
    """
    held = setup.pieces
    assert held is not None  # the vocabulary of such a class is one of SentencePiece
    prefixed = bool(setup.get("add_prefix_space", held.prefixed))
    steps: list[Any] = [*first]
    if held.charsmap is not None:
        steps.append(normalizers.Precompiled(held.charsmap))
    if held.tidy:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    steps += [normalizers.Prepend(SPACE)] if prefixed else []
    steps.append(normalizers.Replace(" ", SPACE))
    steps += [normalizers.Replace(Regex(f"{SPACE}+\\z"), "")] if held.tidy else []
    tokenizer.normalizer = normalizers.Sequence(steps)
    words = [pre_tokenizers.Metaspace(SPACE, prepend_scheme="never")] if held.kind == UNIGRAM and held.tidy else []
    if words or apart:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*apart, *words])
    spaces: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*spaces, *([decoders.Strip(" ", 1, 0)] if prefixed else [])])


def arrange_llama(tokenizer: Tokenizer, setup: Setup) -> None:
    """With ``legacy`` switched off, only the first of the parts between special tokens has a space before it."""
    arrange(tokenizer, setup)
    if not setup.get("legacy", True) and setup.get("add_prefix_space", True):
        tokenizer.normalizer = None
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)


def arrange_albert(tokenizer: Tokenizer, setup: Setup) -> None:
    """All blanks are spaces; without accents, and in lower case."""
    steps: list[Any] = [normalizers.Replace(Regex(r"\s+"), " ")]
    steps += [normalizers.Replace(quote, '"') for quote in ("``", "''")]
    if not setup.get("keep_accents", False):
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if setup.get("do_lower_case", True):
        steps.append(normalizers.Lowercase())
    arrange(tokenizer, setup, first=tuple(steps))


def arrange_deberta(tokenizer: Tokenizer, setup: Setup) -> None:
    """In lower case and split at punctuation, if these are switched on."""
    lower = (normalizers.Lowercase(),) if setup.get("do_lower_case", False) else ()
    marks = (pre_tokenizers.Punctuation("isolated"),) if setup.get("split_by_punct", False) else ()
    arrange(tokenizer, setup, first=lower, apart=marks)


def plain_ends(tokenizer: Tokenizer, setup: Setup, *, bos: Any, eos: Any) -> Any:
    """The processor that adds the first and the last token to a text, each if it is asked for and there is one."""
    first = setup.roles.get("bos_token") if bos else None
    last = setup.roles.get("eos_token") if eos else None
    single = f"{first + ':0 ' if first else ''}$A:0{' ' + last + ':0' if last else ''}"
    pair = f"{single}{' ' + first + ':1' if first else ''} $B:1{' ' + last + ':1' if last else ''}"
    tokens = [(token, tokenizer.token_to_id(token)) for token in (first, last) if token]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=tokens)


def llama_ends(tokenizer: Tokenizer, setup: Setup) -> Any:
    """The first token, unless it is switched off, and the last one, if it is switched on."""
    return plain_ends(tokenizer, setup, bos=setup.get("add_bos_token", True), eos=setup.get("add_eos_token", False))


def t5_ends(tokenizer: Tokenizer, setup: Setup) -> Any:
    """The last token after each text."""
    eos = setup.roles["eos_token"]
    tokens = [(eos, tokenizer.token_to_id(eos) or 0)]
    return processors.TemplateProcessing(single=["$A", eos], pair=["$A", eos, "$B", eos], special_tokens=tokens)


def xlm_roberta_pieces(pieces: Pieces, setup: Setup) -> Pieces:
    """fairseq's order: four special tokens, the pieces after SentencePiece's own three, and the mask."""
    first = [(setup.roles[f"{role}_token"], 0.0) for role in ("bos", "pad", "eos", "unk")]
    return [*first, *pieces[3:], (setup.roles["mask_token"], 0.0)]


def camembert_pieces(pieces: Pieces, setup: Setup) -> Pieces:
    """The special tokens before SentencePiece's own, whose unknown piece no text is split into."""
    roles = setup.roles
    first = [("<s>NOTUSED", 0.0), (roles["pad_token"], 0.0), ("</s>NOTUSED", 0.0), (roles["unk_token"], 0.0)]
    return [*first, ("<unk>NOTUSED", -100.0), *pieces[1:], (roles["mask_token"], 0.0)]


def albert_pieces(pieces: Pieces, setup: Setup) -> Pieces:
    """A comma is no part of the number before it."""
    return [
        (piece, score - 100.0 if piece[-1:] == "," and piece[-2:-1].isdigit() else score) for piece, score in pieces
    ]


def t5_pieces(pieces: Pieces, setup: Setup) -> Pieces:
    """The pieces, and the marks of left out spans behind them."""
    return [*pieces, *((f"<extra_id_{i}>", 0.0) for i in reversed(range(setup.get("extra_ids", 100))))]


def gemma_pieces(pieces: Pieces, setup: Setup) -> Pieces:
    """The tab for its byte, in vocabularies that lack it."""
    if any(piece == "\t" for piece, _ in pieces):
        return pieces
    return [("\t", 0.0) if piece == "<0x09>" else (piece, score) for piece, score in pieces]
