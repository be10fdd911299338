"""Small real tokenizers: one kind for each family, trained on a page of English, in the file formats of the hub."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SENTENCES = (
    "The old mill stands where the river leaves the forest.",
    "A wide pond behind the weir holds the water that turns the wheel.",
    "In a dry summer the miller opens the gate for an hour each morning.",
    "Grain comes by cart from the farms on the hill and leaves as flour.",
    "The wheel is twelve feet across and was built of oak in 1824.",
    "When the pond freezes, children skate to the far bank and back.",
    "Herons fish at the shallow end, and swallows drink on the wing.",
    "A still surface says nothing about the force stored beneath it.",
    "The miller's daughter wrote the level of the water in a book every day.",
    "Her figures show two floods, three droughts, and one spring that came early.",
    "How much water does one sack of wheat need? About as much as the pond loses in a minute.",
    "Stones wear down; a pair lasts fifteen years if the grain is clean.",
    "Visitors ask why the wheel is silent, and the answer is always the same: the gate is shut.",
    "Every engine needs a reservoir, and every reservoir needs a careful hand.",
    "The path along the dam is narrow, so walk slowly and keep to the left.",
    "Query and document, question and answer, passage and title: all are only text.",
    "They sold the timber, kept the stones, and let the reeds grow where the barn had been.",
    "Under the bridge the current is quick, but nobody has ever measured it.",
)

WORDPIECE = "wordpiece"
BYTE_LEVEL = "byte-level"
METASPACE = "metaspace"
UNIGRAM = "unigram"


class TokenizerKind(NamedTuple):
    """The tokenizer of a family."""

    model: str
    tokenizer_class: str
    specials: tuple[str, ...]  # in the order of their ids, from 0
    template: str  # `$A` is the text
    roles: dict[str, str]  # special tokens by role, as in tokenizer_config.json
    options: Mapping[str, Any] = MappingProxyType({})


_BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_BERT_ROLES = {f"{role}_token": f"[{role.upper()}]" for role in ("pad", "unk", "cls", "sep", "mask")}
_BERT_ENDS = {"bos_token": "[CLS]", "eos_token": "[SEP]"}
_ROBERTA = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
_ENDS = {"bos_token": "<s>", "eos_token": "</s>"}
_ROBERTA_ENDS = {**_ENDS, "sep_token": "</s>", "cls_token": "<s>", "pad_token": "<pad>"}
_ROBERTA_ROLES = {**_ROBERTA_ENDS, "unk_token": "<unk>", "mask_token": "<mask>"}
_END = "<|endoftext|>"
_LLAMA = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "pad_token": "<|end_of_text|>"}
_FAST = "PreTrainedTokenizerFast"

KINDS = {
    "bert": TokenizerKind(WORDPIECE, "BertTokenizer", _BERT, "[CLS] $A [SEP]", _BERT_ROLES),
    "mpnet": TokenizerKind(
        WORDPIECE,
        "MPNetTokenizer",
        ("<s>", "<pad>", "</s>", "[UNK]", "<mask>"),
        "<s> $A </s>",
        {**_ROBERTA_ENDS, "unk_token": "[UNK]", "mask_token": "<mask>"},
    ),
    "roberta": TokenizerKind(
        BYTE_LEVEL,
        "RobertaTokenizer",
        _ROBERTA,
        "<s> $A </s>",
        _ROBERTA_ROLES,
        {"add_prefix_space": False, "trim_offsets": True},
    ),
    "xlm-roberta": TokenizerKind(UNIGRAM, "XLMRobertaTokenizer", _ROBERTA, "<s> $A </s>", _ROBERTA_ROLES),
    "camembert": TokenizerKind(
        UNIGRAM,
        "CamembertTokenizer",
        ("<s>NOTUSED", "<pad>", "</s>NOTUSED", "<unk>", "<unk>NOTUSED", "<s>", "</s>", "<mask>"),
        "<s> $A </s>",
        _ROBERTA_ROLES,
    ),
    "albert": TokenizerKind(
        UNIGRAM,
        "AlbertTokenizer",
        ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"),
        "[CLS] $A [SEP]",
        {**_BERT_ROLES, "pad_token": "<pad>", "unk_token": "<unk>", **_BERT_ENDS},
    ),
    "big-bird": TokenizerKind(
        UNIGRAM,
        "BigBirdTokenizer",
        ("<pad>", "</s>", "<s>", "<unk>", "[SEP]", "[CLS]", "[MASK]"),
        "[CLS] $A [SEP]",
        {**_ENDS, **_BERT_ROLES, "unk_token": "<unk>", "pad_token": "<pad>"},
    ),
    "rembert": TokenizerKind(
        UNIGRAM,
        "RemBertTokenizer",
        ("<pad>", "[CLS]", "<unk>", "[SEP]", "[MASK]"),
        "[CLS] $A [SEP]",
        {**_BERT_ROLES, "pad_token": "<pad>", "unk_token": "<unk>", **_BERT_ENDS},
    ),
    "deberta": TokenizerKind(
        UNIGRAM,
        "DebertaV2Tokenizer",
        ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"),
        "[CLS] $A [SEP]",
        {**_BERT_ROLES, **_BERT_ENDS},
    ),
    "deberta-v1": TokenizerKind(
        BYTE_LEVEL,
        "DebertaTokenizer",
        ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"),
        "[CLS] $A [SEP]",
        {**_BERT_ROLES, **_BERT_ENDS},
        {"add_prefix_space": False},
    ),
    "t5": TokenizerKind(
        UNIGRAM,
        "T5Tokenizer",
        ("<pad>", "</s>", "<unk>"),
        "$A </s>",
        {f"{role}_token": token for role, token in (("eos", "</s>"), ("unk", "<unk>"), ("pad", "<pad>"))},
        {"extra_ids": 0},
    ),
    "gpt2": TokenizerKind(
        BYTE_LEVEL,
        "GPT2Tokenizer",
        (_END,),
        "$A",
        dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), _END),  # pad: as in SGPT
    ),
    "modernbert": TokenizerKind(BYTE_LEVEL, _FAST, _BERT, "[CLS] $A [SEP]", _BERT_ROLES),
    "mmbert": TokenizerKind(  # Gemma's vocabulary
        METASPACE,
        _FAST,
        ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>"),
        "<bos> $A <eos>",
        {f"{role}_token": f"<{role}>" for role in ("bos", "eos", "unk", "pad", "mask")},
    ),
    "llama": TokenizerKind(BYTE_LEVEL, _FAST, ("<|begin_of_text|>", "<|end_of_text|>"), "<|begin_of_text|> $A", _LLAMA),
    # e5-mistral pools the eos token; Qwen3-Embedding's post-processor ends every text.
    "mistral": TokenizerKind(
        METASPACE,
        "LlamaTokenizer",
        ("<unk>", "<s>", "</s>"),
        "<s> $A </s>",
        {**_ENDS, "unk_token": "<unk>", "pad_token": "</s>"},
    ),
    "qwen": TokenizerKind(BYTE_LEVEL, "Qwen2Tokenizer", (_END,), f"$A {_END}", {"eos_token": _END, "pad_token": _END}),
    "gemma": TokenizerKind(
        METASPACE,
        "GemmaTokenizer",
        ("<pad>", "<eos>", "<bos>", "<unk>"),
        "<bos> $A",
        {f"{role}_token": f"<{role}>" for role in ("bos", "eos", "unk", "pad")},
    ),
}


def write_tokenizer(
    folder: Path, name: str, *, limit: int | None, lowercase: bool = False, template: str | None = None
) -> int:
    """Write the tokenizer ``name`` of :data:`KINDS` into ``folder``; returns the size of its vocabulary.

    ``limit=None`` writes the very large number that means no limit; ``template`` replaces the kind's.
    """
    kind = KINDS[name]
    tokenizer = _trained(name, lowercase, template or kind.template)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": kind.tokenizer_class,
        "model_max_length": 1000000000000000019884624838656 if limit is None else limit,
        **kind.roles,
        **kind.options,
    }
    if kind.model == WORDPIECE:
        config |= {"do_lower_case": lowercase, "tokenize_chinese_chars": True, "strip_accents": None}
        ordered = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        (folder / "vocab.txt").write_text("".join(f"{token}\n" for token, _ in ordered), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    (folder / "special_tokens_map.json").write_text(json.dumps(kind.roles, indent=2), encoding="utf-8")
    return int(tokenizer.get_vocab_size())


@cache
def _trained(name: str, lowercase: bool, template: str) -> Tokenizer:
    from tokenizers import processors

    kind = KINDS[name]
    tokenizer = {WORDPIECE: _wordpiece, BYTE_LEVEL: _byte_level, METASPACE: _metaspace, UNIGRAM: _unigram}[kind.model](
        kind, lowercase
    )
    _set_steps(tokenizer, kind.tokenizer_class)
    _set_decoder(tokenizer, kind)
    numbers = {token: kind.specials.index(token) for token in template.split() if token != "$A"}
    if template == kind.template and kind.tokenizer_class in ("RobertaTokenizer", "MPNetTokenizer"):
        ends: list[Any] = [(token, numbers[token]) for token in ("</s>", "<s>")]
        tokenizer.post_processor = processors.RobertaProcessing(*ends, trim_offsets=True, add_prefix_space=False)
        return tokenizer
    pair = _PAIRS.get(kind.tokenizer_class) if template == kind.template else None
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=list(numbers.items()), **({} if pair is None else {"pair": pair})
    )
    return tokenizer


# Pair templates of the hub's files; the other kinds have the library's default.
_PAIRS = {
    "BertTokenizer": "[CLS] $A [SEP] $B:1 [SEP]:1",
    "AlbertTokenizer": "[CLS] $A [SEP] $B:1 [SEP]:1",
    "DebertaV2Tokenizer": "[CLS] $A [SEP] $B:1 [SEP]:1",
    "XLMRobertaTokenizer": "<s> $A </s> </s> $B </s>",
    "CamembertTokenizer": "<s> $A </s> </s> $B </s>",
}
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _set_steps(tokenizer: Tokenizer, name: str) -> None:
    """The steps before the model that the hub's files of a class have, where they are more than the trained ones."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    if name == "AlbertTokenizer":
        quotes = [normalizers.Replace(quote, '"') for quote in ("``", "''")]
        letters = [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
        tokenizer.normalizer = normalizers.Sequence([*quotes, *letters])
    elif name == "DebertaV2Tokenizer":
        blanks = normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " ")
        tokenizer.normalizer = normalizers.Sequence([blanks, normalizers.NFC(), normalizers.Strip(left=False)])
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    elif name == "Qwen2Tokenizer":
        tokenizer.normalizer = normalizers.NFC()
        words = pre_tokenizers.Split(Regex(_QWEN_WORDS), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )


def _set_decoder(tokenizer: Tokenizer, kind: TokenizerKind) -> None:
    from tokenizers import decoders

    before = [decoders.Strip(" ", 1, 0)] if "<bos>" not in kind.specials else []  # Llama's first space
    tokenizer.decoder = {
        WORDPIECE: decoders.WordPiece(prefix="##"),
        BYTE_LEVEL: decoders.ByteLevel(),
        UNIGRAM: decoders.Metaspace(),
        METASPACE: decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *before]),
    }[kind.model]


def _wordpiece(kind: TokenizerKind, lowercase: bool) -> Tokenizer:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    words = _words(pre_tokenizers.BertPreTokenizer(), normalizer)
    pieces: Counter[str] = Counter()
    for word, count in words.items():
        pieces.update(dict.fromkeys([word, *_parts(word)], count))
    letters = sorted({letter for word in words for letter in word})
    vocabulary = _ranked([*kind.specials, *letters, *(f"##{letter}" for letter in letters)], pieces, size=360)
    tokenizer = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(list(kind.specials))
    return tokenizer


def _words(splitter: Any, normalizer: Any = None) -> Counter[str]:
    """The words of ``SENTENCES`` with their counts. The library's trainers break ties differently in each run."""
    counts: Counter[str] = Counter()
    for sentence in SENTENCES:
        text = sentence if normalizer is None else normalizer.normalize_str(sentence)
        counts.update(word for word, _ in splitter.pre_tokenize_str(text))
    return counts


def _parts(word: str) -> list[str]:
    """Prefixes and suffixes of a word; suffixes have WordPiece's continuation mark."""
    cuts = range(2, min(5, len(word)))
    return [word[:cut] for cut in cuts] + [f"##{word[-cut:]}" for cut in cuts]


def _ranked(first: Sequence[str], pieces: Counter[str], *, size: int) -> list[str]:
    """``first``, then the most frequent ``pieces``; ties: the longer one first, then alphabetically."""
    known = set(first)
    ordered = sorted(pieces, key=lambda piece: (-pieces[piece], -len(piece), piece))
    return [*first, *(piece for piece in ordered if piece not in known)][:size]


def _byte_level(kind: TokenizerKind, lowercase: bool) -> Tokenizer:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(kind.specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def _metaspace(kind: TokenizerKind, lowercase: bool) -> Tokenizer:
    """SentencePiece's BPE of Llama 2, Mistral and Gemma: unknown characters fall back to their bytes."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    if "<bos>" in kind.specials:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=460, special_tokens=[*kind.specials, *fallback], show_progress=False)
    before = " " if "<bos>" in kind.specials else ""  # words include their space in Gemma; Llama prepends it
    tokenizer.train_from_iterator((before + word for sentence in SENTENCES for word in sentence.split()), trainer)
    return tokenizer


def _unigram(kind: TokenizerKind, lowercase: bool) -> Tokenizer:
    from tokenizers import Tokenizer, models, pre_tokenizers

    splitter = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    words = _words(splitter)
    pieces: Counter[str] = Counter()
    for word, count in words.items():
        for length in range(1, 8):
            for start in range(len(word) - length + 1):
                pieces[word[start : start + length]] += count
    letters = sorted(piece for piece in pieces if len(piece) == 1)
    vocabulary = _ranked([*kind.specials, *letters], pieces, size=240)
    total = sum(pieces[piece] for piece in vocabulary)
    # A longer piece must score higher than the sum of its letters, or it would never be chosen.
    scores = [0.0 if not pieces[p] else len(p) * math.log(pieces[p] / total) / len(p) ** 1.5 for p in vocabulary]
    unknown = kind.specials.index(kind.roles["unk_token"])
    tokenizer = Tokenizer(models.Unigram(list(zip(vocabulary, scores, strict=True)), unknown))
    tokenizer.pre_tokenizer = splitter
    tokenizer.add_special_tokens(list(kind.specials))
    return tokenizer
