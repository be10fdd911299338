"""A checkpoint's tokenizer, built without transformers and equal to its own: from tokenizer.json or a vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models, processors

from millpond.checkpoints.resolve import check_pointer, read_json_object
from millpond.checkpoints.tokenizers import sentencepiece
from millpond.checkpoints.tokenizers.classes import GENERIC
from millpond.checkpoints.tokenizers.pieces import Pieces, Setup, plain_ends
from millpond.checkpoints.tokenizers.sentencepiece import SentencePieceModel
from millpond.checkpoints.tokenizers.settings import ROLES, NotBuiltError, Settings, read_settings
from millpond.errors import ModelLoadError

# Names that a file of SentencePiece has on the hub.
_PIECES = ("sentencepiece.bpe.model", "sentencepiece.model", "spiece.model", "spm.model", "tokenizer.model")
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
    pieces: SentencePieceModel | None = None  # where the vocabulary is SentencePiece's
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
    setup = Setup(settings=fields, roles=texts, pieces=source.pieces)
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
    elif kind.process is not None:
        backend.post_processor = kind.process(backend, setup)
    else:
        bos, eos = fields.get("add_bos_token"), fields.get("add_eos_token")
        backend.post_processor = plain_ends(backend, setup, bos=bos, eos=eos)
    if from_json and _ends_by_config(folder):
        first = backend.encode("").ids[:1] == [backend.token_to_id(texts.get("bos_token", ""))]
        backend.post_processor = plain_ends(backend, setup, bos=first, eos=True)
    elif from_json and _ends_by_own_code(fields):
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
    new = [token for role, token in settings.roles.items() if role in settings.new]
    for token in (*new, *(settings.extra or []), *(pieces or [])):
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


def _ends_by_config(folder: Path) -> bool:
    """Whether NV-Embed's code appends the token that ends a text, which its tokenizer does not."""
    config = read_json_object(folder / "config.json", optional=True)
    return config.get("model_type") == "nvembed" and bool(config.get("add_eos", True))


def _from_json(path: Path) -> _Source:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises bare Exception
        check_pointer(path)
        raise ModelLoadError(f"{path} is no tokenizer that can be read: {error}; fetch it again") from error
    if isinstance(tokenizer.model, models.BPE):
        tokenizer.model.dropout = None  # of training: each reading of a text would be another
    return _Source(tokenizer=tokenizer, added=tokenizer.get_added_tokens_decoder())


def _from_vocabulary(folder: Path, settings: Settings) -> _Source:
    """The vocabulary of the class's own files."""
    kind = settings.kind
    paths = [folder / name for name in kind.vocabulary]
    if paths[0].suffix == ".model" and not paths[0].is_file():  # any file of SentencePiece, if there is one only
        paths = [path for path in sorted(folder.glob("*.model")) if path.name in _PIECES]
    if len(paths) != len(kind.vocabulary) or not all(path.is_file() for path in paths):
        files = " and ".join(kind.vocabulary)
        if any(folder.glob("*.model")) or any(folder.glob("tekken.json")):  # another class's vocabulary
            raise NotBuiltError(f"it has neither tokenizer.json nor {files}, which its class reads")
        raise ModelLoadError(f"{folder} has neither tokenizer.json nor {files}; is the checkpoint complete?")
    roles = {role: str(token) for role, token in settings.roles.items()}
    if paths[0].suffix == ".txt":
        vocabulary = models.WordPiece.read_file(str(paths[0]))
        return _Source(tokenizer=Tokenizer(models.WordPiece(vocabulary, unk_token=roles["unk_token"])))
    if paths[0].suffix == ".json":
        options = {"unk_token": roles.get("unk_token"), **kind.options}
        return _Source(tokenizer=Tokenizer(models.BPE(*models.BPE.read_file(*map(str, paths)), **options)))
    setup = Setup(settings=settings.fields, roles=roles)
    return _from_sentencepiece(sentencepiece.read_sentencepiece(paths[0]), settings, setup)


def _from_sentencepiece(model: SentencePieceModel, settings: Settings, setup: Setup) -> _Source:
    kind, unknown = settings.kind, settings.kind.unknown
    pieces = list(model.pieces) if kind.reorder is None else kind.reorder(list(model.pieces), setup)
    unknown = model.unknown if unknown is None else unknown
    pieces = _replaced(pieces, settings.added or {})
    if model.kind == sentencepiece.UNIGRAM:
        tokenizer = Tokenizer(models.Unigram(pieces, unknown, model.byte_fallback))
    else:
        vocabulary = {piece: number for number, (piece, _) in enumerate(pieces)}
        merges = sentencepiece.merges_of({piece: number for number, (piece, _) in enumerate(model.pieces)})
        merges = [(left, right) for left, right in merges if {left, right, left + right} <= vocabulary.keys()]
        options = {"unk_token": pieces[unknown][0], "fuse_unk": True, "byte_fallback": model.byte_fallback}
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, **options))
    return _Source(
        tokenizer=tokenizer,
        pieces=model,
        extra=[AddedToken(piece, normalized=False, special=special) for piece, special in model.added],
        roles=model.roles if kind is GENERIC else None,
    )


def _replaced(pieces: Pieces, added: Mapping[int, AddedToken]) -> Pieces:
    """The pieces, each with the text that an added token of its id has: placeholders of a model that was tuned."""
    known, pieces = {piece for piece, _ in pieces}, list(pieces)
    for number, token in added.items():
        if number < len(pieces) and token.content not in known:
            pieces[number] = (token.content, pieces[number][1])
    return pieces
