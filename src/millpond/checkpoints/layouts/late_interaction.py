"""Late-interaction checkpoints (ColBERT): how queries and documents become tokens, and how their vectors are compared.

Three layouts describe it, each in its own files: Stanford's (``artifact.metadata``, the projection among the backbone's
tensors; jina-colbert-v2 has it too), PyLate's (keys of config_sentence_transformers.json) and the one of
sentence-transformers' MultiVectorEncoder (its own modules). Nothing is guessed from a tokenizer: ModernBERT's, for
example, has an ``[unused0]`` that is no marker.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from millpond.checkpoints.modules import Dense
from millpond.checkpoints.resolve import read_json_object
from millpond.checkpoints.weights import tensor_shapes
from millpond.errors import ModelLoadError, WeightMismatchError
from millpond.tasks import ROLES, Role

Similarity = Literal["maxsim", "meanmaxsim"]

_PUNCTUATION = tuple(string.punctuation)
# Names of the projection in the backbone's file: Stanford's, and another one that vLLM reads.
_PROJECTIONS = ("linear.weight", "colbert_linear.weight")
# Keys of artifact.metadata that config.json (through hf_overrides) may replace.
_METADATA = (
    "query_token_id doc_token_id query_maxlen doc_maxlen mask_punctuation attend_to_mask_tokens similarity interaction"
).split()
# As in sentence-transformers, a file with any of these keys is in PyLate's format.
_PYLATE = frozenset(
    (
        "query_length document_length query_expansion do_query_expansion attend_to_expansion_tokens "
        "attend_to_mask_tokens query_prefix document_prefix skiplist_words"
    ).split()
)


@dataclass(frozen=True, kw_only=True)
class LateInteraction:
    """How texts become the tokens whose vectors are compared. Lengths include special tokens and the marker."""

    query_marker: str = ""  # the token after a query's leading special token; `""`: none
    document_marker: str = ""  # the same for a document
    query_length: int | None = None  # most tokens of a query; `None`: the model's limit
    document_length: int | None = None  # the same for a document
    expand_to: int | None = None  # queries are padded to this many tokens; `None`: not at all
    expansion_token: str | None = None  # the padding; `None`: the mask token, or without one the end-of-sequence token
    # Other tokens attend to the padding. It attends to the text, and is scored, in either case.
    attend_to_expansion: bool = False
    skiplist: tuple[str, ...] = ()  # tokens that are not scored
    skiplist_roles: tuple[Role, ...] = ("document",)  # the roles for which they are not
    # `maxsim` sums over the query's rows; `meanmaxsim` divides the sum by their number
    similarity: Similarity = "maxsim"

    @property
    def longest(self) -> int | None:
        """Most tokens of either role; ``None`` if one of them has only the model's limit."""
        if self.query_length is None or self.document_length is None:
            return None
        return max(self.query_length, self.document_length)


def names_colbert(config: Mapping[str, Any]) -> bool:
    """Whether config.json (or an override) names a ColBERT class, Stanford's or one of vLLM's."""
    name = str((config.get("architectures") or [""])[0])
    return name == "HF_ColBERT" or name.startswith("ColBERT")


def read_stanford(folder: Path, config: Mapping[str, Any]) -> tuple[LateInteraction, Dense]:
    """Stanford's layout: ``artifact.metadata``, and the projection without bias in the backbone's file.

    ``config`` has precedence over the metadata: ``hf_overrides={"attend_to_mask_tokens": True}``.
    """
    path = folder / "artifact.metadata"
    metadata = read_json_object(path, optional=True)
    metadata |= {key: config[key] for key in _METADATA if key in config}
    for key, only in (("similarity", "cosine"), ("interaction", "colbert")):
        if (metadata.get(key) or only) != only:
            raise ModelLoadError(f"{path}: {key} {metadata[key]!r} is not run; millpond runs {only!r} only")
    query_length = _length(metadata, "query_maxlen", path) or 32
    attend = metadata.get("attend_to_mask_tokens")
    if attend is None:  # only jina-colbert-v2 was trained with it
        attend = config.get("position_embedding_type") == "rotary"
    late = LateInteraction(
        query_marker=str(metadata.get("query_token_id") or "[unused0]"),
        document_marker=str(metadata.get("doc_token_id") or "[unused1]"),
        query_length=query_length,
        document_length=_length(metadata, "doc_maxlen", path) or 220,
        expand_to=query_length,
        attend_to_expansion=bool(attend),
        skiplist=_PUNCTUATION if metadata.get("mask_punctuation", True) else (),
    )
    return late, _read_projection(folder)


def _read_projection(folder: Path) -> Dense:
    shapes = tensor_shapes(folder)
    name = next((name for name in _PROJECTIONS if name in shapes), None)
    if name is None:
        raise WeightMismatchError(
            f"{folder} calls itself a ColBERT, and has neither a modules.json nor {_PROJECTIONS[0]}, the projection; "
            "is the checkpoint complete?"
        )
    if len(shapes[name]) != 2 or "linear.bias" in shapes:
        raise WeightMismatchError(
            f"{folder}: {name} has shape {list(shapes[name])}{' and a bias' if 'linear.bias' in shapes else ''}; "
            "a ColBERT projection is [dim, hidden] and has no bias"
        )
    out_features, in_features = shapes[name]
    return Dense(
        folder=folder,
        in_features=in_features,
        out_features=out_features,
        bias=False,
        activation="torch.nn.Identity",
        residual=False,
        weight=name,
    )


def read_settings(
    settings: Mapping[str, Any], transformer: Path, mask: Mapping[str, Any] | None, path: Path
) -> LateInteraction:
    """PyLate's keys and those of sentence-transformers' own modules, which have precedence."""
    native = settings.get("model_type") == "MultiVectorEncoder"
    options = _pylate_settings(settings, path, native=native)
    module = read_json_object(transformer / "sentence_bert_config.json", optional=True)
    options |= {key: module[key] for key in ("query_length", "document_length", "query_expansion") if key in module}
    expansion = _expansion(options.get("query_expansion"), path)
    attend = bool(expansion.get("attend", False))
    expand_to: int | None = expansion.get("length")
    query_length = expand_to if expansion.get("strategy") == "fixed" else _length(options, "query_length", path)
    if expand_to is not None and query_length is not None:
        query_length = max(query_length, expand_to)
    if native and mask is None and not attend:
        expand_to = None  # without that module the padding is neither scored nor attended to
    skiplist, roles = _skiplist(settings, mask, path, native=native)
    query, document = (_marker(settings, role, transformer, native=native) for role in ROLES)
    return LateInteraction(
        query_marker=query,
        document_marker=document,
        query_length=query_length,
        document_length=_length(options, "document_length", path),
        expand_to=expand_to,
        expansion_token=expansion.get("token"),
        attend_to_expansion=attend,
        skiplist=skiplist,
        skiplist_roles=roles,
        similarity=_similarity(settings, path),
    )


def _pylate_settings(settings: Mapping[str, Any], path: Path, *, native: bool) -> dict[str, Any]:
    """PyLate's flat keys in the terms of sentence-transformers' Transformer module."""
    if native and not _PYLATE & settings.keys():
        return {}
    query_length = _length(settings, "query_length", path) or 32
    options: dict[str, Any] = {
        "document_length": _length(settings, "document_length", path) or (None if native else 180),
        "query_length": query_length,
    }
    if "query_expansion" in settings:
        options["query_expansion"] = settings["query_expansion"]
    elif settings.get("do_query_expansion") is not False:
        attend = settings.get("attend_to_expansion_tokens", settings.get("attend_to_mask_tokens"))
        options["query_expansion"] = {"strategy": "fixed", "attend": bool(attend), "length": query_length}
    return options


def _expansion(value: Any, path: Path) -> Mapping[str, Any]:
    """A ``query_expansion`` with every key understood; empty if it is off."""
    if value is None:
        return {}
    known = {"strategy", "attend", "token", "length"}
    if (
        not isinstance(value, dict)
        or value.keys() - known
        or value.get("strategy") not in ("fixed", "min")
        or not _length(value, "length", path)
    ):
        raise ModelLoadError(
            f"{path.parent}: query_expansion {value!r} is not understood; millpond runs the strategies "
            f"fixed and min with {', '.join(sorted(known))}"
        )
    return value


def _skiplist(
    settings: Mapping[str, Any], mask: Mapping[str, Any] | None, path: Path, *, native: bool
) -> tuple[tuple[str, ...], tuple[Role, ...]]:
    words, roles = (mask or {}).get("skiplist_words"), (mask or {}).get("skiplist_tasks") or ["document"]
    if mask is not None and mask.get("keep_only_token_ids"):
        raise ModelLoadError(f"{path.parent}: MultiVectorMask's keep_only_token_ids is for images, which are not run")
    if mask is None and not native:
        words = settings.get("skiplist_words")
        words = _PUNCTUATION if words is None else words
    roles = [roles] if isinstance(roles, str) else roles
    if not isinstance(words or [], list | tuple) or not set(roles) <= set(ROLES):
        raise ModelLoadError(f"{path.parent}: skiplist_words {words!r} for {roles!r} is not understood")
    return tuple(str(word) for word in words or ()), tuple(roles)


def _marker(settings: Mapping[str, Any], role: Role, transformer: Path, *, native: bool) -> str:
    """The marker: PyLate names it; in sentence-transformers it is the added token that begins the role's prompt."""
    if f"{role}_prefix" in settings:
        return str(settings[f"{role}_prefix"] or "")
    if not native:
        return f"[{role[0].upper()}] "
    prompt = str((settings.get("prompts") or {}).get(role) or "")
    added = read_json_object(transformer / "tokenizer.json", optional=True).get("added_tokens") or [] if prompt else []
    tokens = [str(token.get("content")) for token in added if token.get("content")]
    return max((token for token in tokens if prompt.startswith(token)), key=len, default="")


def _similarity(settings: Mapping[str, Any], path: Path) -> Similarity:
    name = str(settings.get("similarity_fn_name") or "maxsim").lower()
    if name == "cosine":  # left over from a checkpoint that was trained from an embedder
        name = "maxsim"
    if name not in ("maxsim", "meanmaxsim"):
        raise ModelLoadError(f"{path}: similarity_fn_name {name!r} is not run; millpond runs maxsim and meanmaxsim")
    return cast("Similarity", name)


def _length(settings: Mapping[str, Any], key: str, path: Path) -> int | None:
    length = settings.get(key)
    if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
        raise ModelLoadError(f"{path}: {key} must be a positive int, and is {length!r}")
    return length
