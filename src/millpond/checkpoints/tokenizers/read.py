"""A checkpoint's tokenizer, built without transformers and equal to its own: from tokenizer.json or a vocabulary."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from millpond.checkpoints.tokenizers import sentencepiece
from millpond.checkpoints.tokenizers.classes import GENERIC, Setup, TokenizerClass
from millpond.checkpoints.tokenizers.sentencepiece import SentencePieceModel
from millpond.checkpoints.tokenizers.settings import ROLES, NotBuiltError, Settings, read_settings
from millpond.errors import ModelLoadError

_UNHEARD = "\U0010fffe"  # no character, so no vocabulary has it
_ENDS = ("add_bos_token", "add_eos_token")
_OWN_ENDS = "tokenization_qwen.Qwen2Tokenizer"


@dataclass(frozen=True, kw_only=True)
class TokenizerFile:
    """A tokenizer and the properties of its class."""

    backend: Tokenizer  # the tokenizer, without padding and truncation
    limit: int | None  # `model_max_length`; `None` if no file has it
    specials: Mapping[str, str]  # special tokens by role (`cls_token` and so on)
    typed: bool  # whether the class returns token types
    cleans_up: bool = False  # whether a decoded text loses the spaces before its signs


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A vocabulary, and what came with it."""

    tokenizer: Tokenizer  # the file's, or one without any steps
    from_json: bool
    charsmap: bytes | None = None
    added: Mapping[int, AddedToken] | None = None  # tokens of tokenizer.json, by id
    extra: list[AddedToken | str] | None = None  # tokens of SentencePiece
    roles: Mapping[str, str] | None = None  # special tokens of SentencePiece, which a class without its own takes


def read_tokenizer(folder: Path) -> TokenizerFile:
    """The tokenizer in ``folder``.

    Raises:
        NotBuiltError: It is of a class, or has a setting, that is not known here; transformers may read it.
        ModelLoadError: A file is damaged.
    """
    try:
        return _read(folder)
    except (NotBuiltError, ModelLoadError):
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelLoadError(f"{folder} has no tokenizer that can be read here: {error}") from error
    except Exception as error:  # the tokenizers library raises bare Exception
        if type(error) is not Exception:
            raise
        raise ModelLoadError(f"{folder} has no tokenizer that can be read here: {error}") from error


def _read(folder: Path) -> TokenizerFile:
    settings = read_settings(folder)
    path = folder / "tokenizer.json"
    source = _from_json(path, settings) if path.is_file() else _from_vocabulary(folder, settings)
    if source.roles:
        settings = replace(settings, roles={**source.roles, **settings.roles})
    backend = source.tokenizer
    kind, fields = settings.kind, settings.fields
    texts = {role: str(token) for role, token in settings.roles.items()}
    setup = Setup(settings=fields, roles=texts, charsmap=source.charsmap)
    processor = backend.post_processor if source.from_json else None
    if kind.arrange is not None:
        backend = Tokenizer(backend.model)
        kind.arrange(backend, setup)
    backend.encode_special_tokens = bool(setup.get("split_special_tokens", False))
    declared = settings.added if settings.added is not None else {}
    if fields.get("added_tokens_decoder") is None:
        declared = {**declared, **(source.added or {})}
    _add(backend, declared, settings, source.extra)
    ends = {} if source.from_json else {name: fields[name] for name in _ENDS if name in fields}
    if kind.process is not None and (kind.replaces or (processor is None and not ends)):
        processor = kind.process(backend, setup)
    backend.post_processor = _plain_ends(backend, texts, ends) if processor is None else processor
    if source.from_json and _ends_by_own_code(fields):
        eos = _plain_ends(backend, texts, {"add_eos_token": True})
        backend.post_processor = eos if processor is None else processors.Sequence([processor, eos])
    backend.no_padding()
    backend.no_truncation()
    limit, names = fields.get("model_max_length", fields.get("max_len")), fields.get("model_input_names")
    return TokenizerFile(
        backend=backend,
        limit=None if limit is None else int(limit),
        specials={role: texts[role] for role in (*ROLES, *texts) if role in texts},
        typed=kind.typed if names is None else "token_type_ids" in names,
        cleans_up=bool(setup.get("clean_up_tokenization_spaces", False)) and type(backend.model).__name__ != "BPE",
    )


def _add(
    backend: Tokenizer, declared: Mapping[int, AddedToken], settings: Settings, pieces: list[AddedToken | str] | None
) -> None:
    """Add the tokens to the vocabulary that transformers adds, in its order."""
    held = backend.get_added_tokens_decoder().values()
    known = {repr(token) for token in held}
    added: list[AddedToken | str] = [token for _, token in sorted(declared.items()) if repr(token) not in known]
    texts = {token.content for token in held} | {str(token) for token in added}
    extra = settings.extra if settings.extra is not None else pieces or []
    for token in (*settings.roles.values(), *extra):
        if str(token) not in texts and token not in added:
            added.append(token)
    roles = {str(token) for token in settings.roles.values()}
    for token in added:
        added_token = AddedToken(token, special=True) if isinstance(token, str) else token
        added_token.special = added_token.special or str(token) in roles
        backend.add_tokens([added_token])


def _plain_ends(backend: Tokenizer, roles: Mapping[str, str], fields: Mapping[str, Any]) -> Any:
    """The processor of a class that has none: the ends of a text that tokenizer_config.json asks for."""
    bos = roles.get("bos_token") if fields.get("add_bos_token") else None
    eos = roles.get("eos_token") if fields.get("add_eos_token") else None
    single = f"{bos + ':0 ' if bos else ''}$A:0{' ' + eos + ':0' if eos else ''}"
    pair = f"{single}{' ' + bos + ':1' if bos else ''} $B:1{' ' + eos + ':1' if eos else ''}"
    tokens = [(token, backend.token_to_id(token)) for token in (bos, eos) if token]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=tokens)


def _ends_by_own_code(fields: Mapping[str, Any]) -> bool:
    """Whether code of the checkpoint's own appends the token that ends a text: that of gte-Qwen2 and its relatives."""
    own = fields.get("auto_map")
    listed = own.get("AutoTokenizer") if isinstance(own, Mapping) else own
    names = listed if isinstance(listed, list) else [listed]
    return bool(fields.get("add_eos_token")) and any(_OWN_ENDS in str(name) for name in names)


def _from_json(path: Path, settings: Settings) -> _Source:
    """The vocabulary of tokenizer.json; everything, for a class that takes the file as it is."""
    tokenizer = Tokenizer.from_file(str(path))
    added = tokenizer.get_added_tokens_decoder()
    kind = settings.kind
    if kind.arrange is None:
        return _Source(tokenizer=tokenizer, from_json=True, added=added)
    model: Any = tokenizer.model
    if type(model).__name__ != kind.model:
        raise NotBuiltError(f"tokenizer.json holds a {type(model).__name__}, and its class takes a {kind.model}")
    roles = {role: str(token) for role, token in settings.roles.items()}
    if kind.model == "WordPiece":
        model.unk_token, model.continuing_subword_prefix, model.max_input_chars_per_word = roles["unk_token"], "##", 100
    elif kind.model == "BPE":
        for name, value in _bpe_options(settings, roles).items():
            setattr(model, name, value)
    elif not _has_unknown(model, path, kind, roles["unk_token"]):
        stored = json.loads(path.read_bytes())["model"]["vocab"]
        pieces = [(str(piece), float(score)) for piece, score in stored]
        tokenizer.model = models.Unigram(pieces, _unknown_of(pieces, kind, roles["unk_token"], 1), False)
    return _Source(tokenizer=tokenizer, from_json=True, charsmap=_charsmap_of(tokenizer.normalizer), added=added)


def _has_unknown(model: Any, path: Path, kind: TokenizerClass, token: str) -> bool:
    """Whether a file's Unigram has the class's unknown piece, and does not fall back to bytes.

    The library does not expose either, and to parse the file in Python would take as long again as to load it.
    """
    try:
        found = [piece.id for piece in model.tokenize(_UNHEARD)]
    except Exception as error:  # it has no unknown piece
        if type(error) is not Exception:
            raise
        return False
    expected = kind.unknown
    if expected is None:
        without_score = rb"\[\s*" + re.escape(json.dumps(token).encode()) + rb"\s*,\s*0\.0\s*\]"
        expected = model.token_to_id(token) if re.search(without_score, path.read_bytes()) else None
    return found == [expected]


def _unknown_of(pieces: list[tuple[str, float]], kind: TokenizerClass, token: str, default: int) -> int:
    """The id of the unknown piece that the class takes; ``default``: the file's, for a class that asks it."""
    if kind.unknown is not None:
        return kind.unknown
    return pieces.index((token, 0.0)) if (token, 0.0) in pieces else default


def _bpe_options(settings: Settings, roles: Mapping[str, str]) -> dict[str, Any]:
    options = {"dropout": None, "byte_fallback": False, "ignore_merges": False, "unk_token": roles.get("unk_token")}
    return {**options, **settings.kind.options}


def _charsmap_of(normalizer: Any) -> bytes | None:
    """The compiled normalization among a normalizer's steps."""
    state = {} if normalizer is None else json.loads(normalizer.__getstate__())
    for step in state.get("normalizers", [state]):
        if step.get("type") == "Precompiled":
            return base64.b64decode(step["precompiled_charsmap"])
    return None


def _from_vocabulary(folder: Path, settings: Settings) -> _Source:
    """The vocabulary of the class's own files."""
    kind = settings.kind
    paths = [folder / name for name in kind.vocabulary]
    if not all(path.is_file() for path in paths):
        files = " and ".join(kind.vocabulary)
        if any(folder.glob("*.model")) or any(folder.glob("tekken.json")):  # another class's vocabulary
            raise NotBuiltError(f"it has neither tokenizer.json nor {files}, which its class reads")
        raise ModelLoadError(f"{folder} has neither tokenizer.json nor {files}; is the checkpoint complete?")
    roles = {role: str(token) for role, token in settings.roles.items()}
    if kind.model == "WordPiece":
        vocabulary = models.WordPiece.read_file(str(paths[0]))
        return _Source(tokenizer=Tokenizer(models.WordPiece(vocabulary, unk_token=roles["unk_token"])), from_json=False)
    if kind.vocabulary == ("vocab.json", "merges.txt"):
        model = models.BPE(*models.BPE.read_file(*map(str, paths)), **_bpe_options(settings, roles))
        return _Source(tokenizer=Tokenizer(model), from_json=False)
    return _from_sentencepiece(sentencepiece.read_sentencepiece(paths[0]), settings, roles)


def _from_sentencepiece(model: SentencePieceModel, settings: Settings, roles: Mapping[str, str]) -> _Source:
    kind, pieces = settings.kind, list(model.pieces)
    extra: list[AddedToken | str] = [
        AddedToken(piece, normalized=False, special=special) for piece, special in model.added
    ]
    if kind.model == "Unigram":
        pieces = pieces if kind.reorder is None else kind.reorder(pieces, roles)
        unknown = _unknown_of(pieces, kind, roles["unk_token"], model.unknown)
        tokenizer = Tokenizer(models.Unigram(pieces, unknown, False))
        return _Source(tokenizer=tokenizer, from_json=False, charsmap=model.charsmap, extra=extra)
    options = _bpe_options(settings, roles)
    if kind is GENERIC:
        options = {"unk_token": model.roles.get("unk_token", "<unk>"), "fuse_unk": True}
        options["byte_fallback"] = model.byte_fallback
    if kind is GENERIC and model.kind == sentencepiece.UNIGRAM:
        if settings.added:
            raise NotBuiltError("tokenizer_config.json has added_tokens_decoder beside a model of SentencePiece")
        tokenizer = Tokenizer(models.Unigram(pieces, model.unknown, model.byte_fallback))
    else:
        vocabulary = {piece: number for number, (piece, _) in enumerate(pieces)}
        merges = sentencepiece.merges_of(vocabulary)
        if kind is GENERIC:
            _replace_placeholders(vocabulary, settings.added or {})
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, **options))
    if kind is GENERIC:
        steps: list[Any] = [] if model.charsmap is None else [normalizers.Precompiled(model.charsmap)]
        tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
        fallback: list[Any] = [decoders.ByteFallback(), decoders.Fuse()] if model.byte_fallback else []
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), *fallback])
        return _Source(tokenizer=tokenizer, from_json=False, extra=extra, roles=model.roles)
    return _Source(tokenizer=tokenizer, from_json=False, extra=extra)


def _replace_placeholders(vocabulary: dict[str, int], added: Mapping[int, AddedToken]) -> None:
    """Give a piece the text that an added token of its id has."""
    pieces = {number: piece for piece, number in vocabulary.items()}
    for number, token in added.items():
        piece = pieces.get(number)
        if piece and piece != str(token) and str(token) not in vocabulary:
            vocabulary[str(token)] = vocabulary.pop(piece)
