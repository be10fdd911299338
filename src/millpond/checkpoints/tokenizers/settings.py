"""What a checkpoint's files say of its tokenizer besides the vocabulary, by transformers' rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from millpond.checkpoints.resolve import read_json, read_json_object
from millpond.checkpoints.tokenizers.classes import CLASSES, GENERIC, TokenizerClass
from millpond.errors import ModelLoadError

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Settings that make transformers do something which is not done here.
_OTHER_WAYS = ("fast_tokenizer_files", "fix_mistral_regex", "gguf_file", "init_inputs")
# transformers' class of each `model_type`; families that it does not know, or knows none for, are not listed.
_BY_FAMILY = {
    **dict.fromkeys(("bert", "distilbert", "electra", "ernie", "megatron-bert", "nomic_bert"), "BertTokenizer"),
    **dict.fromkeys(("roberta", "bart", "data2vec-text", "longformer"), "RobertaTokenizer"),
    "camembert": "CamembertTokenizer",
    "mobilebert": "MobileBertTokenizer",
    "mpnet": "MPNetTokenizer",
    **dict.fromkeys(("xlm-roberta", "gte", "jina_embeddings_v3"), "XLMRobertaTokenizer"),
    "albert": "AlbertTokenizer",
    "big_bird": "BigBirdTokenizer",
    "deberta": "DebertaTokenizer",
    "deberta-v2": "DebertaV2Tokenizer",
    "gpt2": "GPT2Tokenizer",
    "gpt_neox": "GPTNeoXTokenizer",
    **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    "rembert": "RemBertTokenizer",
    "roformer": "RoFormerTokenizer",  # not built here: it splits Chinese into words by the library jieba
    **dict.fromkeys(("t5", "mt5"), "T5Tokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("mistral", "modernbert", "internlm2", "jamba"), "TokenizersBackend"),
}
# transformers 4's, of families whose class above reads no vocabulary but tokenizer.json.
_BY_FAMILY_OF_PIECES = {
    **dict.fromkeys(("llama", "mistral", "internlm2", "jamba", "phi3"), "LlamaTokenizer"),
    **dict.fromkeys(("t5", "mt5", "umt5"), "T5Tokenizer"),
    "xlm-roberta-xl": "XLMRobertaTokenizer",
}
# Families whose checkpoints name a wrong class so often that the one above is taken.
_ALWAYS = ("qwen2", "modernbert", "internlm2", "jamba")


# transformers' classes that split texts in Python, and how; without tokenizer.json nothing else can read their files.
_IN_PYTHON = {
    "PhobertTokenizer": "by vocab.txt and bpe.codes, Vietnamese words segmented before",
    "BertweetTokenizer": "by vocab.txt and bpe.codes, tweets rewritten before",
    "BertJapaneseTokenizer": "Japanese words by the library MeCab",
    "RoFormerTokenizer": "Chinese words by the library jieba",
}
# Those of them whose tokenizer.json has another splitter in the place of the one in Python.
_NOT_IN_FILE = ("RoFormerTokenizer",)


class NotBuiltError(Exception):
    """Why a tokenizer is not built here."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings, and the tokens that are added to the vocabulary."""

    kind: TokenizerClass
    declared: TokenizerClass  # the class that the files name, where it is known here; else `kind`
    fields: Mapping[str, Any]  # tokenizer_config.json, and what special_tokens_map.json adds
    roles: dict[str, AddedToken | str]  # special tokens by role, those of the class included
    new: frozenset[str]  # roles whose token is added if the vocabulary lacks it
    added: dict[int, AddedToken] | None  # by id; `None`: those of tokenizer.json
    extra: list[AddedToken | str] | None  # special tokens without a role; `None`: no file has a list of them


def read_settings(folder: Path) -> Settings:
    """The settings in ``folder``; raises NotBuiltError for a class or a setting that is not known here."""
    fields = read_json_object(folder / "tokenizer_config.json", optional=True)
    config = read_json_object(folder / "config.json", optional=True)
    kind = _class_of(config, fields, folder)
    held = [name for name in _OTHER_WAYS if fields.get(name)]
    if held:
        raise NotBuiltError(f"tokenizer_config.json has {held[0]}")
    if not fields.get("extra_special_tokens") and "additional_special_tokens" in fields:
        fields["extra_special_tokens"] = fields.pop("additional_special_tokens")
    declared = fields.get("added_tokens_decoder")
    if declared is None:
        _merge_map(fields, read_json_object(folder / "special_tokens_map.json", optional=True))
    added = None if declared is None else {int(number): token_of(token) for number, token in declared.items()}
    if declared is None and (folder / "added_tokens.json").is_file():
        added = _added_tokens(folder / "added_tokens.json", fields)
    roles = {name: value for name, value in fields.items() if _is_role(name, value)}
    has_file = (folder / "tokenizer.json").is_file()
    extra = fields.get("extra_special_tokens", None if has_file else kind.extra)
    if isinstance(extra, dict):
        roles |= extra
        extra = None
    by_text = {token.content: token for token in (added or {}).values()}
    named: dict[str, Any] = {**kind.roles, **roles}
    for role in ROLES if kind.plain_specials else ("mask_token",) * kind.spaced_mask:
        token = named.get(role)
        if isinstance(token, str):
            spaced = kind.spaced_mask and role == "mask_token"
            named[role] = by_text.get(token) or AddedToken(token, lstrip=spaced, special=not kind.plain_specials)
    order = [*ROLES, *(name for name in named if name not in ROLES)]
    return Settings(
        kind=kind,
        declared=CLASSES.get(_named(config, fields), kind),
        fields=fields,
        roles={role: _role(named[role], by_text) for role in order if named.get(role) is not None},
        new=frozenset(roles if has_file else named),  # a class's own is no row of the weights that came with the file
        added=added,
        extra=None if extra is None else [token if isinstance(token, str) else token_of(token) for token in extra],
    )


def _named(config: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    """The class that the files name; empty if they name none."""
    return str(fields.get("tokenizer_class") or config.get("tokenizer_class") or "").removesuffix("Fast")


def _class_of(config: Mapping[str, Any], fields: Mapping[str, Any], folder: Path) -> TokenizerClass:
    """The class that transformers takes."""
    family = str(config.get("model_type"))
    registered, named = _BY_FAMILY.get(family), _named(config, fields)
    name = named or registered or "TokenizersBackend"
    remote, has_file = isinstance(fields.get("auto_map"), dict | list), (folder / "tokenizer.json").is_file()
    if not has_file:
        if name not in _IN_PYTHON and (folder / "bpe.codes").is_file():  # where no file names its class
            name = "PhobertTokenizer"
        if name in _IN_PYTHON:
            raise ModelLoadError(
                f"{folder} has no tokenizer.json, and its tokenizer, transformers' {name}, splits texts in Python "
                f"({_IN_PYTHON[name]}), which millpond does not run; write tokenizer.json, where a converter for it is "
                "at hand, or choose a multilingual model, such as BAAI/bge-m3"
            )
        known = CLASSES.get(name, GENERIC)
        if known is GENERIC:  # no class, or one for every file: the family says what reads its vocabulary
            name = _BY_FAMILY_OF_PIECES.get(family) or (registered if named in CLASSES else None) or name
    elif family in _ALWAYS:
        name = name if remote and name in CLASSES else str(registered)
    elif not remote and (registered == "TokenizersBackend" or (name == "LlamaTokenizer" and _is_byte_level(folder))):
        name = "TokenizersBackend"
    if name not in CLASSES and has_file and not remote and name not in _NOT_IN_FILE:
        return GENERIC  # whatever the class is, the file has its steps
    if name not in CLASSES:
        raise NotBuiltError(f"its class is {name}")
    return CLASSES[name]


def _is_byte_level(folder: Path) -> bool:
    path = folder / "tokenizer.json"
    return path.is_file() and b'"ByteLevel"' in path.read_bytes()


def _is_role(name: str, value: Any) -> bool:
    """Whether a setting is a special token: one of the roles, or a model's own."""
    if name in ROLES:
        return True
    return name.endswith("_token") and isinstance(value, str | dict | AddedToken)


def _merge_map(fields: dict[str, Any], special: Mapping[str, Any]) -> None:
    """Take over special_tokens_map.json, which counts where there is no ``added_tokens_decoder``."""
    for name, value in special.items():
        if isinstance(value, dict) and name != "extra_special_tokens":
            fields[name] = token_of({**value, "special": True})
        elif name == "extra_special_tokens" and isinstance(value, list):
            held = list(fields.get(name) or [])
            fields[name] = held + [token for token in value if token not in held]
        elif name == "additional_special_tokens":
            fields.setdefault("extra_special_tokens", value)
        else:
            fields[name] = value


def _added_tokens(path: Path, fields: Mapping[str, Any]) -> dict[int, AddedToken]:
    """The tokens of added_tokens.json, of old checkpoints: a text and its id."""
    special = {_text(fields[role]) for role in ROLES if fields.get(role)}
    special |= {_text(token) for token in fields.get("extra_special_tokens") or []}
    content = read_json(path)
    return {
        int(number): AddedToken(text, normalized=text not in special, special=text in special)
        for text, number in content.items()
    }


def token_of(value: Any) -> AddedToken:
    """A token from its fields in JSON."""
    if isinstance(value, AddedToken):
        return value
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(value["content"], **{flag: value[flag] for flag in flags if flag in value})


def _role(value: Any, known: Mapping[str, AddedToken]) -> AddedToken | str:
    """A special token: the added token of its text, if there is one."""
    token = value if isinstance(value, str) else token_of(value)
    return known.get(_text(token), token)


def _text(token: Any) -> str:
    return str(token.get("content")) if isinstance(token, dict) else str(getattr(token, "content", token))
