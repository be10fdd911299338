"""tokenizer.json read directly, if transformers would build the same tokenizer.

Importing transformers takes a second, and its classes rebuild their tokenizer from the file's vocabulary with their own
rules for the rest (case folding, splitting, special tokens), so the file alone is not enough. This module knows the
rules of the few classes of BERT-like encoders: a file whose every part equals what its class would build is read
directly; any other is left to transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors

from millpond.checkpoints.architectures import row_of
from millpond.checkpoints.resolve import read_json_object
from millpond.errors import ModelLoadError

# In the order of transformers' map of special tokens.
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Keys of tokenizer_config.json that are read here, and keys that do not change ids. Any other may change the tokenizer.
_READ = {
    *_ROLES,
    *"add_prefix_space added_tokens_decoder do_lower_case model_input_names model_max_length strip_accents".split(),
    *"tokenize_chinese_chars tokenizer_class trim_offsets".split(),
}
_IGNORED = set(
    (
        "backend clean_up_tokenization_spaces do_basic_tokenize errors is_local local_files_only max_length "
        "name_or_path never_split pad_to_multiple_of pad_token_type_id padding_side sp_model_kwargs "
        "special_tokens_map_file stride tokenizer_file truncation_side truncation_strategy"
    ).split()
)
_BERT_ROLES = {f"{role}_token": f"[{role.upper()}]" for role in ("unk", "sep", "pad", "cls", "mask")}
_ROBERTA_ROLES = dict(zip(_ROLES, ("<s>", "</s>", "<unk>", "</s>", "<pad>", "<s>", "<mask>"), strict=True))


@dataclass(frozen=True, kw_only=True)
class TokenizerFile:
    """A tokenizer and the properties of its class."""

    backend: Tokenizer  # the tokenizer; padding and truncation are those of the file
    limit: int | None  # `model_max_length`; `None` if no file has it
    specials: Mapping[str, str]  # special tokens by role (`cls_token` and so on)
    typed: bool  # whether the class returns token types


@dataclass(frozen=True, kw_only=True)
class _Class:
    """One of transformers' tokenizer classes."""

    roles: Mapping[str, str]  # special tokens that the files do not name
    # Given `(tokenizer, path of its file, settings, roles)`: whether the class would build that tokenizer
    builds: Callable[[Tokenizer, Path, Mapping[str, Any], Mapping[str, str]], bool]
    typed: bool = False  # whether it returns token types


def read_as_is(folder: Path) -> TokenizerFile | None:
    """The tokenizer of ``folder`` without transformers; ``None`` if transformers has to build it."""
    path = folder / "tokenizer.json"
    if not path.is_file() or any((folder / name).exists() for name in ("added_tokens.json", "chat_template.jinja")):
        return None
    try:
        config, settings = read_json_object(folder / "config.json"), _optional(folder / "tokenizer_config.json")
        kind = _class_of(config, settings)
        if kind is None or not settings.keys() <= _READ | _IGNORED or settings.get("never_split"):
            return None
        settings_and_map = settings if "added_tokens_decoder" in settings else settings | _optional(folder / _MAP)
        backend = Tokenizer.from_file(str(path))
        roles = _roles(settings_and_map, kind)
        known = roles is not None and _same_tokens(backend, settings.get("added_tokens_decoder"), roles)
        if roles is None or not known or not kind.builds(backend, path, settings, roles):
            return None
    except (ModelLoadError, OSError, ValueError, TypeError, AttributeError):
        return None  # transformers reports the error
    except Exception as error:  # the tokenizers library raises bare Exception
        if type(error) is not Exception:
            raise
        return None
    limit, names = settings.get("model_max_length"), settings.get("model_input_names")
    return TokenizerFile(
        backend=backend,
        limit=None if limit is None else int(limit),
        specials=roles,
        typed=kind.typed if names is None else "token_type_ids" in names,
    )


_MAP = "special_tokens_map.json"


def _class_of(config: Mapping[str, Any], settings: Mapping[str, Any]) -> _Class | None:
    """The tokenizer class that transformers would take, if it is one that its family has in the table."""
    row = row_of(str(config.get("model_type")))
    if row is None or not row.tokenizers:
        return None
    declared = settings.get("tokenizer_class") or config.get("tokenizer_class")
    name = str(declared).removesuffix("Fast") if declared else row.tokenizers[0]
    return _CLASSES[name] if name in row.tokenizers else None


def _optional(path: Path) -> dict[str, Any]:
    """The content of the file, empty if there is none; without empty lists of tokens, which mean nothing."""
    lists = ("additional_special_tokens", "extra_special_tokens")
    content = read_json_object(path, optional=True)
    return {name: value for name, value in content.items() if value or name not in lists}


def _roles(settings: Mapping[str, Any], kind: _Class) -> dict[str, str] | None:
    """Special tokens by role; ``None`` if the files have other keys, or a role that is no token."""
    if not settings.keys() <= _READ | _IGNORED:
        return None
    roles: dict[str, str] = {}
    for role in _ROLES:
        value = settings.get(role, kind.roles.get(role))
        token = value.get("content") if isinstance(value, dict) else value
        if isinstance(token, str):
            roles[role] = token
        elif role in settings:
            return None
    return roles


def _same_tokens(backend: Tokenizer, declared: Mapping[str, Any] | None, roles: Mapping[str, str]) -> bool:
    """Whether transformers would add the same tokens to the vocabulary as the file."""
    added = backend.get_added_tokens_decoder()
    if any(backend.model.token_to_id(token.content) != number for number, token in added.items()):
        return False  # outside the vocabulary: its id would depend on the order of adding
    if declared is not None and {int(number): _fields(token) for number, token in declared.items()} != {
        number: _fields(token.__getstate__()) for number, token in added.items()
    }:
        return False
    special = {token.content for token in added.values() if token.special}
    return special.issuperset(roles.values())


def _fields(token: Mapping[str, Any]) -> dict[str, Any]:
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {"content": token["content"], **{flag: token.get(flag) for flag in flags}}


def _state(part: Any) -> Any:
    """A part of a tokenizer as in its file, comparable in spite of the order of the keys."""
    return None if part is None else json.loads(part.__getstate__())


def _is_wordpiece(backend: Tokenizer, settings: Mapping[str, Any], roles: Mapping[str, str]) -> bool:
    model: Any = backend.model
    return (
        type(model).__name__ == "WordPiece"
        and model.unk_token == roles["unk_token"]
        and model.continuing_subword_prefix == "##"
        and model.max_input_chars_per_word == 100
        and _state(backend.pre_tokenizer) == _state(pre_tokenizers.BertPreTokenizer())
        and _state(backend.normalizer)
        == _state(
            normalizers.BertNormalizer(
                clean_text=True,
                handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
                strip_accents=settings.get("strip_accents"),
                lowercase=settings.get("do_lower_case", True),
            )
        )
    )


def _builds_bert(backend: Tokenizer, path: Path, settings: Mapping[str, Any], roles: Mapping[str, str]) -> bool:
    cls, sep = roles["cls_token"], roles["sep_token"]
    processor = processors.TemplateProcessing(
        single=f"{cls}:0 $A:0 {sep}:0",
        pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
        special_tokens=[(cls, _id_of(backend, cls)), (sep, _id_of(backend, sep))],
    )
    return _is_wordpiece(backend, settings, roles) and _state(backend.post_processor) == _state(processor)


def _builds_mpnet(backend: Tokenizer, path: Path, settings: Mapping[str, Any], roles: Mapping[str, str]) -> bool:
    processor = _roberta_processor(backend, roles, trim_offsets=True, add_prefix_space=False)
    return _is_wordpiece(backend, settings, roles) and _state(backend.post_processor) == _state(processor)


def _builds_roberta(backend: Tokenizer, path: Path, settings: Mapping[str, Any], roles: Mapping[str, str]) -> bool:
    model: Any = backend.model
    prefix, trim = settings.get("add_prefix_space", False), settings.get("trim_offsets", True)
    return (
        type(model).__name__ == "BPE"
        and not any((model.dropout, model.unk_token, model.fuse_unk, model.byte_fallback, model.ignore_merges))
        and not (model.continuing_subword_prefix or model.end_of_word_suffix)
        and backend.normalizer is None
        and _state(backend.pre_tokenizer) == _state(pre_tokenizers.ByteLevel(add_prefix_space=prefix))
        and _state(backend.post_processor)
        == _state(_roberta_processor(backend, roles, trim_offsets=trim, add_prefix_space=prefix))
    )


def _roberta_processor(
    backend: Tokenizer, roles: Mapping[str, str], *, trim_offsets: bool, add_prefix_space: bool
) -> processors.RobertaProcessing:
    sep, cls = roles["sep_token"], roles["cls_token"]
    return processors.RobertaProcessing(
        (sep, _id_of(backend, sep)), (cls, _id_of(backend, cls)), trim_offsets, add_prefix_space
    )


def _id_of(backend: Tokenizer, token: str) -> int:
    token_id = backend.token_to_id(token)
    assert token_id is not None  # _same_tokens found every role's token in the vocabulary
    return token_id


def _builds_xlm_roberta(backend: Tokenizer, path: Path, settings: Mapping[str, Any], roles: Mapping[str, str]) -> bool:
    bos, eos = roles["bos_token"], roles["eos_token"]
    scheme = "always" if settings.get("add_prefix_space", True) else "never"
    splitter = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme)]
    )
    processor = processors.TemplateProcessing(
        single=[bos, "$A", eos],
        pair=[bos, "$A", eos, eos, "$B", eos],
        special_tokens=[(bos, _id_of(backend, bos)), (eos, _id_of(backend, eos))],
    )
    if (
        type(backend.model).__name__ != "Unigram"
        or _state(backend.pre_tokenizer) != _state(splitter)
        or _state(backend.post_processor) != _state(processor)
        or (_state(backend.normalizer) or {"type": "Precompiled"})["type"] != "Precompiled"
    ):
        return False
    model = json.loads(path.read_bytes())["model"]  # the library does not expose these
    return bool(model.get("unk_id") == 3 and not model.get("byte_fallback"))


_BERT = _Class(roles=_BERT_ROLES, builds=_builds_bert, typed=True)
_DISTILBERT = _Class(roles=_BERT_ROLES, builds=_builds_bert)
_MPNET = _Class(roles={**_ROBERTA_ROLES, "unk_token": "[UNK]"}, builds=_builds_mpnet)
_ROBERTA = _Class(roles=_ROBERTA_ROLES, builds=_builds_roberta)
_XLM_ROBERTA = _Class(roles=_ROBERTA_ROLES, builds=_builds_xlm_roberta)
# By transformers' name.
_CLASSES = {
    "BertTokenizer": _BERT,
    "DistilBertTokenizer": _DISTILBERT,
    "MPNetTokenizer": _MPNET,
    "RobertaTokenizer": _ROBERTA,
    "XLMRobertaTokenizer": _XLM_ROBERTA,
}
