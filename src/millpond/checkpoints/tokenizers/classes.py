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

# Qwen2's words: contractions, letters with one sign before them, single digits, signs, line ends, blanks.
_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPACE = "▁"  # SentencePiece's space


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a class makes its tokenizer from, besides the vocabulary."""

    settings: Mapping[str, Any]  # tokenizer_config.json
    roles: Mapping[str, str]  # special tokens by role
    charsmap: bytes | None  # SentencePiece's compiled normalization

    def get(self, name: str, default: Any) -> Any:
        """The value of a setting; null counts as absent."""
        value = self.settings.get(name)
        return default if value is None else value


@dataclass(frozen=True, kw_only=True)
class TokenizerClass:
    """One class."""

    model: str  # its model in the library tokenizers; empty: that of the file
    vocabulary: tuple[str, ...]  # the files of its vocabulary, where there is no tokenizer.json
    roles: Mapping[str, str]  # special tokens that the files do not name
    options: Mapping[str, Any] = field(default_factory=dict)  # of a BPE model
    # Changes the steps of a tokenizer.json; and sets the steps before the model, and the one after it, without that
    adapt: Callable[[Tokenizer, Setup], None] | None = None
    arrange: Callable[[Tokenizer, Setup], None] | None = None
    process: Callable[[Tokenizer, Setup], Any] | None = None  # `None`: the ends that tokenizer_config.json asks for
    replaces: bool = True  # whether its post-processor goes before the ends that are asked for
    typed: bool = False  # whether it returns token types
    spaced_mask: bool = False  # the mask takes the space before it
    plain_specials: bool = False  # special tokens are found in normalized texts
    extra: tuple[str, ...] | None = None  # special tokens without a role, where no file names any
    unknown: int | None = None  # id of a Unigram's unknown piece; `None`: that of the token for it, if it has no score
    # Given SentencePiece's pieces and the roles: the vocabulary
    reorder: Callable[[list[tuple[str, float]], Mapping[str, str]], list[tuple[str, float]]] | None = None


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
            rest = [normalizers.Prepend(_SPACE), *rest]
        tokenizer.normalizer = normalizers.Sequence(rest)
    adapt_ends(tokenizer, setup)


def adapt_ends(tokenizer: Tokenizer, setup: Setup, *, bos: bool = True) -> None:
    """The ends of a text, where tokenizer_config.json says one of them; ``bos``: the class's default."""
    asked = [setup.get(f"add_{end}_token", None) for end in ("bos", "eos")]
    if asked != [None, None]:
        tokenizer.post_processor = plain_ends(tokenizer, setup, bos=bos if asked[0] is None else asked[0], eos=asked[1])


def plain_ends(tokenizer: Tokenizer, setup: Setup, *, bos: Any, eos: Any) -> Any:
    """The processor that adds the first and the last token to a text, each if it is asked for and there is one."""
    first = setup.roles.get("bos_token") if bos else None
    last = setup.roles.get("eos_token") if eos else None
    single = f"{first + ':0 ' if first else ''}$A:0{' ' + last + ':0' if last else ''}"
    pair = f"{single}{' ' + first + ':1' if first else ''} $B:1{' ' + last + ':1' if last else ''}"
    tokens = [(token, tokenizer.token_to_id(token)) for token in (first, last) if token]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=tokens)


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


def _llama(tokenizer: Tokenizer, setup: Setup) -> None:
    scheme = "always" if setup.get("legacy", False) else "first"
    if not setup.get("add_prefix_space", True):
        scheme = "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([] if scheme == "never" else [decoders.Strip(" ", 1, 0)])])


def _gemma(tokenizer: Tokenizer, setup: Setup) -> None:
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous", invert=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])


def _xlm_roberta(tokenizer: Tokenizer, setup: Setup) -> None:
    if setup.charsmap is not None:
        tokenizer.normalizer = normalizers.Precompiled(setup.charsmap)
    _split_words(tokenizer, setup)


def _albert(tokenizer: Tokenizer, setup: Setup) -> None:
    steps: list[Any] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not setup.get("keep_accents", False):
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if setup.get("do_lower_case", True):
        steps.append(normalizers.Lowercase())
    if setup.charsmap is not None:
        steps.append(normalizers.Precompiled(setup.charsmap))
    tokenizer.normalizer = normalizers.Sequence(steps)
    _split_words(tokenizer, setup)


def _rembert(tokenizer: Tokenizer, setup: Setup) -> None:
    steps: list[Any] = [
        normalizers.Replace("``", '"'),
        normalizers.Replace("''", '"'),
        normalizers.Replace(Regex(" {2,}"), " "),
    ]
    if not setup.get("keep_accents", True):
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if setup.get("do_lower_case", False):
        steps.append(normalizers.Lowercase())
    _pieces(tokenizer, setup, steps)


def _big_bird(tokenizer: Tokenizer, setup: Setup) -> None:
    _pieces(tokenizer, setup, [normalizers.Replace(Regex(" {2,}"), " ")])


def _pieces(tokenizer: Tokenizer, setup: Setup, steps: list[Any]) -> None:
    """SentencePiece's own splitting into pieces, after these steps of its normalizer."""
    if setup.charsmap is not None:
        steps.append(normalizers.Precompiled(setup.charsmap))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme="always")


def _split_words(tokenizer: Tokenizer, setup: Setup) -> None:
    scheme = "always" if setup.get("add_prefix_space", True) else "never"
    space = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), space])
    tokenizer.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme=scheme)


def _deberta(tokenizer: Tokenizer, setup: Setup) -> None:
    steps: list[Any] = [normalizers.Lowercase()] if setup.get("do_lower_case", False) else []
    steps += [normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " "), normalizers.NFC()]
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Strip(left=False, right=True)])
    scheme = "always" if setup.get("add_prefix_space", True) else "first"
    parts: list[Any] = [pre_tokenizers.Punctuation("isolated")] if setup.get("split_by_punct", False) else []
    parts.append(pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme=scheme)


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


def _xlm_roberta_pieces(pieces: list[tuple[str, float]], roles: Mapping[str, str]) -> list[tuple[str, float]]:
    """fairseq's order: four special tokens, the pieces after SentencePiece's own three, and the mask."""
    first = [(roles[f"{role}_token"], 0.0) for role in ("bos", "pad", "eos", "unk")]
    return [*first, *pieces[3:], (roles["mask_token"], 0.0)]


def _camembert_pieces(pieces: list[tuple[str, float]], roles: Mapping[str, str]) -> list[tuple[str, float]]:
    """The special tokens before SentencePiece's own, whose unknown piece no text is split into."""
    first = [("<s>NOTUSED", 0.0), (roles["pad_token"], 0.0), ("</s>NOTUSED", 0.0), (roles["unk_token"], 0.0)]
    return [*first, ("<unk>NOTUSED", -100.0), *pieces[1:], (roles["mask_token"], 0.0)]


_BRACKETS = {f"{role}_token": f"[{role.upper()}]" for role in ("unk", "sep", "pad", "cls", "mask")}
_ROBERTA = {f"{role}_token": "<s>" for role in ("bos", "cls")} | {f"{role}_token": "</s>" for role in ("eos", "sep")}
_ROBERTA |= {f"{role}_token": f"<{role}>" for role in ("unk", "pad", "mask")}
_END = "<|endoftext|>"
_PLAIN_BPE = {"continuing_subword_prefix": "", "end_of_word_suffix": "", "unk_token": None, "fuse_unk": False}
_BYTES = {"fuse_unk": True, "byte_fallback": True}

_BERT_CLASS = TokenizerClass(
    model="WordPiece",
    vocabulary=("vocab.txt",),
    roles=_BRACKETS,
    adapt=_adapt_bert,
    arrange=_bert,
    process=_in_brackets,
    typed=True,
)
_ROBERTA_CLASS = TokenizerClass(
    model="BPE",
    vocabulary=("vocab.json", "merges.txt"),
    roles=_ROBERTA,
    options=_PLAIN_BPE,
    adapt=_adapt_roberta,
    arrange=_byte_level,
    process=_roberta_ends,
)
GENERIC = TokenizerClass(model="", vocabulary=("tokenizer.model",), roles={}, adapt=_adapt_generic)
# By transformers' name.
CLASSES: Mapping[str, TokenizerClass] = {
    "TokenizersBackend": GENERIC,
    "PreTrainedTokenizer": GENERIC,
    "PreTrainedTokenizerFast": GENERIC,
    "BertTokenizer": _BERT_CLASS,
    "ElectraTokenizer": _BERT_CLASS,
    "DistilBertTokenizer": replace(_BERT_CLASS, typed=False),
    "MPNetTokenizer": TokenizerClass(
        model="WordPiece",
        vocabulary=("vocab.txt",),
        roles={**_ROBERTA, "unk_token": "[UNK]"},
        adapt=_adapt_mpnet,
        arrange=_bert,
        process=_mpnet_ends,
        spaced_mask=True,
        plain_specials=True,
    ),
    "RobertaTokenizer": _ROBERTA_CLASS,
    "LongformerTokenizer": _ROBERTA_CLASS,
    "MobileBertTokenizer": _BERT_CLASS,
    "GPT2Tokenizer": TokenizerClass(
        model="BPE",
        vocabulary=("vocab.json", "merges.txt"),
        roles=dict.fromkeys(("unk_token", "bos_token", "eos_token"), _END),
        options=_PLAIN_BPE,
        adapt=_adapt_byte_level,
        arrange=_byte_level,
    ),
    "Qwen2Tokenizer": TokenizerClass(
        model="BPE",
        vocabulary=("vocab.json", "merges.txt"),
        roles=dict.fromkeys(("unk_token", "eos_token", "pad_token"), _END),
        options=_PLAIN_BPE,
        adapt=_adapt_generic,
        arrange=_qwen,
    ),
    "XLMRobertaTokenizer": TokenizerClass(
        model="Unigram",
        vocabulary=("sentencepiece.bpe.model",),
        roles=_ROBERTA,
        arrange=_xlm_roberta,
        process=_xlm_roberta_ends,
        unknown=3,
        reorder=_xlm_roberta_pieces,
    ),
    "CamembertTokenizer": TokenizerClass(
        model="Unigram",
        vocabulary=("sentencepiece.bpe.model",),
        roles=_ROBERTA,
        arrange=_xlm_roberta,
        process=_xlm_roberta_ends,
        spaced_mask=True,
        extra=("<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED"),
        reorder=_camembert_pieces,
    ),
    "DebertaTokenizer": TokenizerClass(  # its pairs have one separator between their texts, in transformers 5 two
        model="BPE",
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
        model="Unigram",
        vocabulary=("spiece.model",),
        roles={**_BRACKETS, "bos_token": "[CLS]", "eos_token": "[SEP]", "unk_token": "<unk>", "pad_token": "<pad>"},
        arrange=_albert,
        process=_in_brackets,
        replaces=False,
        unknown=1,
    ),
    "BigBirdTokenizer": TokenizerClass(
        model="Unigram",
        vocabulary=("spiece.model",),
        roles={**_ROBERTA, **{role: _BRACKETS[role] for role in ("sep_token", "cls_token", "mask_token")}},
        arrange=_big_bird,
        process=_in_brackets,
        spaced_mask=True,
    ),
    "RemBertTokenizer": TokenizerClass(
        model="Unigram",
        vocabulary=("sentencepiece.model",),
        roles={**_BRACKETS, "bos_token": "[CLS]", "eos_token": "[SEP]", "unk_token": "<unk>", "pad_token": "<pad>"},
        arrange=_rembert,
        process=_in_brackets,
    ),
    "DebertaV2Tokenizer": TokenizerClass(
        model="Unigram",
        vocabulary=("spm.model",),
        roles={**_BRACKETS, "bos_token": "[CLS]", "eos_token": "[SEP]"},
        arrange=_deberta,
        process=_in_brackets,
        typed=True,
    ),
    "LlamaTokenizer": TokenizerClass(
        model="BPE",
        vocabulary=("tokenizer.model",),
        roles={"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
        options={**_BYTES, "unk_token": None},
        adapt=_adapt_llama,
        arrange=_llama,
    ),
    "GemmaTokenizer": TokenizerClass(
        model="BPE",
        vocabulary=("tokenizer.model",),
        roles={f"{role}_token": f"<{role}>" for role in ("unk", "bos", "eos", "pad", "mask")},
        options=_BYTES,
        adapt=adapt_ends,
        arrange=_gemma,
    ),
}
