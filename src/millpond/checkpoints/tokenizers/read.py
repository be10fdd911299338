"""A checkpoint's tokenizer, built without transformers and equal to its own: from tokenizer.json or a vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from millpond.checkpoints.tokenizers import sentencepiece
from millpond.checkpoints.tokenizers.classes import GENERIC, Setup, TokenizerClass, plain_ends
from millpond.checkpoints.tokenizers.sentencepiece import SentencePieceModel
from millpond.checkpoints.tokenizers.settings import ROLES, NotBuiltError, Settings, read_settings
from millpond.errors import ModelLoadError

_ENDS = ("add_bos_token", "add_eos_token")
_OWN_ENDS = "tokenization_qwen.Qwen2Tokenizer"


@dataclass(frozen=True, kw_only=True)
class TokenizerFile:
    """A tokenizer and the properties of its class."""

    backend: Tokenizer  # the tokenizer, without padding and truncation
    limit: int | None  # `model_max_length`; `None` if no file has it
    specials: Mapping[str, str]  # special tokens by role (`cls_token` and so on)
    typed: bool  # whether the class returns token types
    cuts_start: bool = False  # whether a text that is too long loses its start: `truncation_side` is left
    cleans_up: bool = False  # whether a decoded text loses the spaces before its signs


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A vocabulary, and what came with it."""

    tokenizer: Tokenizer  # the file's, or one without any steps
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
    from_json = path.is_file()
    source = _from_json(path) if from_json else _from_vocabulary(folder, settings)
    if source.roles:
        settings = replace(settings, roles={**source.roles, **settings.roles})
    backend = source.tokenizer
    kind, fields = settings.kind, settings.fields
    texts = {role: str(token) for role, token in settings.roles.items()}
    setup = Setup(settings=fields, roles=texts, charsmap=source.charsmap)
    if kind.arrange is not None and not from_json:
        kind.arrange(backend, setup)
    backend.encode_special_tokens = bool(setup.get("split_special_tokens", False))
    declared = settings.added if settings.added is not None else {}
    if fields.get("added_tokens_decoder") is None:
        declared = {**declared, **(source.added or {})}
    _add(backend, declared, settings, source.extra)
    if from_json:
        if settings.declared.adapt is not None:
            settings.declared.adapt(backend, setup)
    elif kind.process is not None and (kind.replaces or not any(name in fields for name in _ENDS)):
        backend.post_processor = kind.process(backend, setup)
    else:
        bos, eos = (fields.get(name) for name in _ENDS)
        backend.post_processor = plain_ends(backend, setup, bos=bos, eos=eos)
    if from_json and _ends_by_own_code(fields):
        last, held = plain_ends(backend, setup, bos=False, eos=True), backend.post_processor
        backend.post_processor = last if held is None else processors.Sequence([held, last])
    side = fields.get("truncation_side") or (backend.truncation or {}).get("direction")
    backend.no_padding()
    backend.no_truncation()
    limit, names = fields.get("model_max_length", fields.get("max_len")), fields.get("model_input_names")
    return TokenizerFile(
        backend=backend,
        limit=None if limit is None else int(limit),
        specials={role: texts[role] for role in (*ROLES, *texts) if role in texts},
        typed=kind.typed if names is None else "token_type_ids" in names,
        cuts_start=str(side).lower() == "left",
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


def _ends_by_own_code(fields: Mapping[str, Any]) -> bool:
    """Whether code of the checkpoint's own appends the token that ends a text: that of gte-Qwen2 and its relatives."""
    own = fields.get("auto_map")
    listed = own.get("AutoTokenizer") if isinstance(own, Mapping) else own
    names = listed if isinstance(listed, list) else [listed]
    return bool(fields.get("add_eos_token")) and any(_OWN_ENDS in str(name) for name in names)


def _from_json(path: Path) -> _Source:
    tokenizer = Tokenizer.from_file(str(path))
    if isinstance(tokenizer.model, models.BPE):
        tokenizer.model.dropout = None  # of training: each reading of a text would be another
    return _Source(tokenizer=tokenizer, added=tokenizer.get_added_tokens_decoder())


def _unknown_of(pieces: list[tuple[str, float]], kind: TokenizerClass, token: str, default: int) -> int:
    """The id of the unknown piece that the class takes; ``default``: the file's, for a class that asks it."""
    if kind.unknown is not None:
        return kind.unknown
    return pieces.index((token, 0.0)) if (token, 0.0) in pieces else default


def _bpe_options(settings: Settings, roles: Mapping[str, str]) -> dict[str, Any]:
    options = {"dropout": None, "byte_fallback": False, "ignore_merges": False, "unk_token": roles.get("unk_token")}
    return {**options, **settings.kind.options}


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
        return _Source(tokenizer=Tokenizer(models.WordPiece(vocabulary, unk_token=roles["unk_token"])))
    if kind.vocabulary == ("vocab.json", "merges.txt"):
        model = models.BPE(*models.BPE.read_file(*map(str, paths)), **_bpe_options(settings, roles))
        return _Source(tokenizer=Tokenizer(model))
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
        return _Source(tokenizer=tokenizer, charsmap=model.charsmap, extra=extra)
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
        return _Source(tokenizer=tokenizer, extra=extra, roles=model.roles)
    return _Source(tokenizer=tokenizer, extra=extra)


def _replace_placeholders(vocabulary: dict[str, int], added: Mapping[int, AddedToken]) -> None:
    """Give a piece the text that an added token of its id has."""
    pieces = {number: piece for piece, number in vocabulary.items()}
    for number, token in added.items():
        piece = pieces.get(number)
        if piece and piece != str(token) and str(token) not in vocabulary:
            vocabulary[str(token)] = vocabulary.pop(piece)
