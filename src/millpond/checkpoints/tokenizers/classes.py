"""transformers' tokenizer classes that are built here.

A tokenizer.json is read as it is, but for the settings of tokenizer_config.json that a class of transformers 4 takes
instead of the file's (``adapt``). transformers 5 takes its vocabulary and post-processor only, and so loses the rest.
To a vocabulary without that file a class adds everything else by itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors

from millpond.checkpoints.tokenizers import pieces
from millpond.checkpoints.tokenizers.pieces import Pieces, Setup

# Qwen2's words: contractions, letters with one sign before them, single digits, signs, line ends, blanks.
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True)
class TokenizerClass:
    """One class."""

    vocabulary: tuple[str, ...]  # the files of its vocabulary, where there is no tokenizer.json
    roles: Mapping[str, str]  # special tokens that the files do not name
    options: Mapping[str, Any] = field(default_factory=dict)  # of a BPE model
    # Changes the steps of a tokenizer.json; and sets the steps before the model, and the one after it, without that
    adapt: Callable[[Tokenizer, Setup], None] | None = None
    arrange: Callable[[Tokenizer, Setup], None] | None = None
    process: Callable[[Tokenizer, Setup], Any] | None = None  # `None`: the ends that tokenizer_config.json asks for
    typed: bool = False  # whether it returns token types
    spaced_mask: bool = False  # the mask takes the space before it
    plain_specials: bool = False  # special tokens are found in normalized texts
    extra: tuple[str, ...] | None = None  # special tokens without a role, where no file names any
    reorder: Callable[[Pieces, Setup], Pieces] | None = None  # given SentencePiece's pieces: the vocabulary
    unknown: int | None = None  # id of the unknown piece; `None`: SentencePiece's


def _bert(tokenizer: Tokenizer, setup: Setup) -> None:
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=setup.get("tokenize_chinese_chars", True),
        strip_accents=setup.get("strip_accents", None),
        lowercase=setup.get("do_lower_case", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")


def _adapt_bert(tokenizer: Tokenizer, setup: Setup) -> None:
    if isinstance(tokenizer.normalizer, normalizers.BertNormalizer):
        tokenizer.normalizer.handle_chinese_chars = bool(setup.get("tokenize_chinese_chars", True))
    _adapt_mpnet(tokenizer, setup)


def _adapt_mpnet(tokenizer: Tokenizer, setup: Setup) -> None:
    if isinstance(tokenizer.normalizer, normalizers.BertNormalizer):
        tokenizer.normalizer.lowercase = bool(setup.get("do_lower_case", True))
        tokenizer.normalizer.strip_accents = setup.get("strip_accents", None)


def _adapt_byte_level(tokenizer: Tokenizer, setup: Setup) -> None:
    if isinstance(tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel):
        tokenizer.pre_tokenizer.add_prefix_space = bool(setup.get("add_prefix_space", False))


def _adapt_roberta(tokenizer: Tokenizer, setup: Setup) -> None:
    _adapt_byte_level(tokenizer, setup)
    if isinstance(tokenizer.post_processor, processors.RobertaProcessing):
        held = json.loads(tokenizer.post_processor.__getstate__())
        tokenizer.post_processor = processors.RobertaProcessing(
            tuple(held["sep"]),
            tuple(held["cls"]),
            bool(setup.get("trim_offsets", True)),
            bool(setup.get("add_prefix_space", False)),
        )


def _adapt_generic(tokenizer: Tokenizer, setup: Setup) -> None:
    if setup.get("add_prefix_space", None) is not None:
        _adapt_byte_level(tokenizer, setup)


def _adapt_llama(tokenizer: Tokenizer, setup: Setup) -> None:
    """The space before a text, a step of the normalizer or of the pre-tokenizer, and the ends."""
    words: Any = tokenizer.pre_tokenizer
    normalizer: Any = tokenizer.normalizer
    sequence = isinstance(normalizer, normalizers.Sequence)
    steps = [*normalizer] if sequence else [] if normalizer is None else [normalizer]
    rest = [step for step in steps if not isinstance(step, normalizers.Prepend)]
    in_words = isinstance(words, pre_tokenizers.Metaspace)
    spaced = len(rest) < len(steps) or (in_words and words.prepend_scheme != "never")
    wanted = bool(setup.get("add_prefix_space", spaced))
    if wanted != spaced and (words is None or in_words):
        if in_words:
            words.prepend_scheme = "first" if wanted else "never"
        elif wanted:
            rest = [normalizers.Prepend(pieces.SPACE), *rest]
        tokenizer.normalizer = normalizers.Sequence(rest)
    adapt_ends(tokenizer, setup)


def adapt_ends(tokenizer: Tokenizer, setup: Setup) -> None:
    """The ends of a text, where tokenizer_config.json says one of them."""
    if any(setup.get(f"add_{end}_token", None) is not None for end in ("bos", "eos")):
        tokenizer.post_processor = pieces.llama_ends(tokenizer, setup)


def _adapt_neox(tokenizer: Tokenizer, setup: Setup) -> None:
    _adapt_byte_level(tokenizer, setup)
    bos, eos = (setup.get(f"add_{end}_token", None) for end in ("bos", "eos"))
    if (bos, eos) != (None, None):
        tokenizer.post_processor = pieces.plain_ends(tokenizer, setup, bos=bos, eos=eos)


def _byte_level(tokenizer: Tokenizer, setup: Setup) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(setup.get("add_prefix_space", False)))
    tokenizer.decoder = decoders.ByteLevel()


def _qwen(tokenizer: Tokenizer, setup: Setup) -> None:
    prefix = bool(setup.get("add_prefix_space", False))
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(_QWEN_WORDS), behavior="isolated", invert=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()


def _in_brackets(tokenizer: Tokenizer, setup: Setup) -> Any:
    """A text between its first token and separators, each text of a pair of its own type."""
    cls, sep = setup.roles["cls_token"], setup.roles["sep_token"]
    return processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=_numbered(tokenizer, setup, "cls_token", "sep_token"),
    )


def _roberta_ends(tokenizer: Tokenizer, setup: Setup) -> Any:
    return _ends(
        tokenizer,
        setup,
        trim_offsets=bool(setup.get("trim_offsets", True)),
        add_prefix_space=bool(setup.get("add_prefix_space", False)),
    )


def _mpnet_ends(tokenizer: Tokenizer, setup: Setup) -> Any:
    return _ends(tokenizer, setup, trim_offsets=True, add_prefix_space=False)


def _ends(tokenizer: Tokenizer, setup: Setup, *, trim_offsets: bool, add_prefix_space: bool) -> Any:
    sep, cls = _numbered(tokenizer, setup, "sep_token", "cls_token")
    return processors.RobertaProcessing(sep, cls, trim_offsets, add_prefix_space)


def _numbered(tokenizer: Tokenizer, setup: Setup, *roles: str) -> list[tuple[str, int]]:
    """The tokens of roles with their ids; they were added to the vocabulary before."""
    return [(setup.roles[role], tokenizer.token_to_id(setup.roles[role]) or 0) for role in roles]


def _xlm_roberta_ends(tokenizer: Tokenizer, setup: Setup) -> Any:
    bos, eos = setup.roles["bos_token"], setup.roles["eos_token"]
    return processors.TemplateProcessing(
        single=[bos, "$A", eos],
        pair=[bos, "$A", eos, eos, "$B", eos],
        special_tokens=_numbered(tokenizer, setup, "bos_token", "eos_token"),
    )


_BRACKETS = {f"{role}_token": f"[{role.upper()}]" for role in ("unk", "sep", "pad", "cls", "mask")}
_ROBERTA = {f"{role}_token": "<s>" for role in ("bos", "cls")} | {f"{role}_token": "</s>" for role in ("eos", "sep")}
_ROBERTA |= {f"{role}_token": f"<{role}>" for role in ("unk", "pad", "mask")}
_CLS_PIECES = {**_BRACKETS, "bos_token": "[CLS]", "eos_token": "[SEP]", "unk_token": "<unk>", "pad_token": "<pad>"}
_END = "<|endoftext|>"
_PLAIN_BPE = {"continuing_subword_prefix": "", "end_of_word_suffix": "", "unk_token": None, "fuse_unk": False}

_BERT_CLASS = TokenizerClass(
    vocabulary=("vocab.txt",),
    roles=_BRACKETS,
    adapt=_adapt_bert,
    arrange=_bert,
    process=_in_brackets,
    typed=True,
)
_ROBERTA_CLASS = TokenizerClass(
    vocabulary=("vocab.json", "merges.txt"),
    roles=_ROBERTA,
    options=_PLAIN_BPE,
    adapt=_adapt_roberta,
    arrange=_byte_level,
    process=_roberta_ends,
)
GENERIC = TokenizerClass(vocabulary=("tokenizer.model",), roles={}, adapt=_adapt_generic, arrange=pieces.arrange)
# By transformers' name.
CLASSES: Mapping[str, TokenizerClass] = {
    "TokenizersBackend": GENERIC,
    **dict.fromkeys(("PreTrainedTokenizer", "PhobertTokenizer"), GENERIC),
    "PreTrainedTokenizerFast": GENERIC,
    "BertTokenizer": _BERT_CLASS,
    **dict.fromkeys(("ElectraTokenizer", "MobileBertTokenizer"), _BERT_CLASS),
    "DistilBertTokenizer": replace(_BERT_CLASS, typed=False),
    "MPNetTokenizer": TokenizerClass(
        vocabulary=("vocab.txt",),
        roles={**_ROBERTA, "unk_token": "[UNK]"},
        adapt=_adapt_mpnet,
        arrange=_bert,
        process=_mpnet_ends,
        spaced_mask=True,
        plain_specials=True,
    ),
    **dict.fromkeys(("RobertaTokenizer", "BartTokenizer", "LongformerTokenizer"), _ROBERTA_CLASS),
    "GPT2Tokenizer": TokenizerClass(
        vocabulary=("vocab.json", "merges.txt"),
        roles=dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END),
        options=_PLAIN_BPE,
        adapt=_adapt_byte_level,
        arrange=_byte_level,
    ),
    "Qwen2Tokenizer": TokenizerClass(
        vocabulary=("vocab.json", "merges.txt"),
        roles=dict.fromkeys(("unk_token", "eos_token", "pad_token"), _END),
        options=_PLAIN_BPE,
        adapt=_adapt_generic,
        arrange=_qwen,
    ),
    "XLMRobertaTokenizer": TokenizerClass(
        vocabulary=("sentencepiece.bpe.model",),
        roles=_ROBERTA,
        arrange=pieces.arrange,
        process=_xlm_roberta_ends,
        unknown=3,
        reorder=pieces.xlm_roberta_pieces,
    ),
    "CamembertTokenizer": TokenizerClass(
        vocabulary=("sentencepiece.bpe.model",),
        roles=_ROBERTA,
        arrange=pieces.arrange,
        process=_xlm_roberta_ends,
        spaced_mask=True,
        unknown=3,
        extra=("<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED"),
        reorder=pieces.camembert_pieces,
    ),
    "DebertaTokenizer": TokenizerClass(  # its pairs have one separator between their texts, in transformers 5 two
        vocabulary=("vocab.json", "merges.txt"),
        roles={**_BRACKETS, "bos_token": "[CLS]", "eos_token": "[SEP]"},
        options=_PLAIN_BPE,
        adapt=_adapt_byte_level,
        arrange=_byte_level,
        process=_in_brackets,
        spaced_mask=True,
        typed=True,
    ),
    "AlbertTokenizer": TokenizerClass(
        vocabulary=("spiece.model",),
        roles=_CLS_PIECES,
        arrange=pieces.arrange_albert,
        process=_in_brackets,
        reorder=pieces.albert_pieces,
    ),
    "DebertaV2Tokenizer": TokenizerClass(
        vocabulary=("spm.model",),
        roles={**_BRACKETS, "bos_token": "[CLS]", "eos_token": "[SEP]"},
        arrange=pieces.arrange_deberta,
        process=_in_brackets,
        typed=True,
    ),
    "LlamaTokenizer": TokenizerClass(
        vocabulary=("tokenizer.model",),
        roles={"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
        adapt=_adapt_llama,
        arrange=pieces.arrange_llama,
        process=pieces.llama_ends,
    ),
    "GemmaTokenizer": TokenizerClass(
        vocabulary=("tokenizer.model",),
        roles={f"{role}_token": f"<{role}>" for role in ("unk", "bos", "eos", "pad", "mask")},
        adapt=adapt_ends,
        arrange=pieces.arrange,
        process=pieces.llama_ends,
        reorder=pieces.gemma_pieces,
    ),
    "T5Tokenizer": TokenizerClass(
        vocabulary=("spiece.model",),
        roles={"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
        arrange=pieces.arrange,
        process=pieces.t5_ends,
        reorder=pieces.t5_pieces,
        extra=tuple(f"<extra_id_{i}>" for i in range(100)),
    ),
    "RemBertTokenizer": TokenizerClass(
        vocabulary=("sentencepiece.model",),
        roles=_CLS_PIECES,
        arrange=pieces.arrange,
        process=_in_brackets,
    ),
    "BigBirdTokenizer": TokenizerClass(
        vocabulary=("spiece.model",),
        roles={**_CLS_PIECES, "bos_token": "<s>", "eos_token": "</s>"},
        arrange=pieces.arrange,
        process=_in_brackets,
        spaced_mask=True,
    ),
    "GPTNeoXTokenizer": TokenizerClass(
        vocabulary=("vocab.json", "merges.txt"),
        roles=dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END),
        options=_PLAIN_BPE,
        adapt=_adapt_neox,
        arrange=_byte_level,
    ),
}
