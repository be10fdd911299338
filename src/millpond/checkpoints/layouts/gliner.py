"""GLiNER and GLiNER2: one weight file, in which an encoder has a head for labels of the caller's.

An encoder reads the labels, each behind a marker, and then the words of a text; the head compares the states of words,
or of spans between two words, with those of the markers (Zaratiana et al., 2023). GLiNER2 (Zaratiana et al., 2025) has
other tasks too, of which the entities are read; a second head says whether there are any.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from millpond.checkpoints.resolve import read_json_object, resolve_texts
from millpond.checkpoints.weights import tensor_shapes
from millpond.errors import ModelLoadError, UnsupportedArchitectureError

CONFIG = "gliner_config.json"
# What precedes the encoder's tensors
_BACKBONE, _BACKBONE2 = "token_rep_layer.bert_layer.model", "encoder"
# A token that the library adds before its markers; nothing uses it.
_ADDED_FIRST = "[FLERT]"
_WORD_TABLES = ("word_embeddings.weight", "tok_embeddings.weight", "embed_tokens.weight", "shared.weight")
# Tokens of a word at most: the library bounds words only, and the tokenizers of most checkpoints nothing.
_TOKENS_OF_WORD = 16
_WORDS2 = 2048  # most words of a text; the library gliner2 reads as many as there are
SpanMode = Literal["markerV0", "marker", "token_level"]
Counting = Literal["count_lstm", "count_lstm_v2"]
# Fields whose value makes a model of another kind, and what that is.
_OTHER_KINDS = {
    "labels_encoder": "a bi-encoder, which reads labels with a second encoder",
    "labels_decoder": "a GLiNER with a decoder, which writes labels",
    "relations_layer": "a GLiNER of relations",
    "post_fusion_schema": "a GLiNER that fuses words and labels once more",
    "fuse_layers": "a GLiNER that fuses the encoder's layers",
    "span_encoder_config": "a GLiNER with a second encoder before the spans",
    "represent_spans": "a GLiNER that scores the spans of its words",
    "precomputed_prompts_mode": "a GLiNER of fixed labels",
}


@dataclass(frozen=True, kw_only=True)
class Gliner:
    """How a GLiNER reads labels and words, and which spans it scores."""

    folder: Path  # of gliner_config.json and the weights
    tokenizer: Path  # of the tokenizer's files
    config: Mapping[str, Any]  # config.json of the encoder
    span_mode: SpanMode
    hidden_size: int  # width of the head
    max_width: int  # most words of an entity
    max_words: int  # most words of a text
    layers: int  # of the LSTM over the words; 0: none
    ent_token: str  # the marker before a label
    sep_token: str  # the marker behind the labels
    marks_label: bool  # whether the state of the marker stands for the label, or that of the token behind it
    backbone: str = _BACKBONE  # what precedes the encoder's tensors
    counting: Counting | None = None  # GLiNER2: what is computed from the markers before spans are compared with them

    @property
    def added_tokens(self) -> tuple[str, ...]:
        """Tokens that the tokenizer is to have, the markers at the end."""
        return () if self.counting else (_ADDED_FIRST, self.ent_token, self.sep_token)

    @property
    def max_tokens(self) -> int:
        """Most tokens of a text and its labels, where the tokenizer sets no limit."""
        return _TOKENS_OF_WORD * self.max_words


def read_gliner(folder: Path, name: str) -> Gliner:
    """The layout of ``folder``, which has a gliner_config.json.

    Raises:
        UnsupportedArchitectureError: It is a GLiNER of another kind.
        ModelLoadError: A file is missing or damaged, or the encoder's name cannot be resolved.
    """
    path = folder / CONFIG
    stored = read_json_object(path)
    _check_kind(stored, name)
    own = (folder / "tokenizer_config.json").is_file()
    encoder = stored.get("encoder_config")
    elsewhere = folder
    if not own or not isinstance(encoder, dict):
        base = stored.get("model_name")
        if not isinstance(base, str) or not base:
            raise ModelLoadError(f"{path} has no model_name, whose tokenizer and config.json the model needs")
        elsewhere = _encoder_at(base, name)
    config = encoder if isinstance(encoder, dict) else read_json_object(elsewhere / "config.json")
    return Gliner(
        folder=folder,
        tokenizer=folder if own else elsewhere,
        # The library fills in DeBERTa where encoder_config has no model_type. Class names are those of other heads.
        config=_encoder_config(folder, {"model_type": "deberta-v2", **config}, _BACKBONE, name),
        span_mode=stored.get("span_mode", "markerV0"),
        hidden_size=_positive(stored, "hidden_size", 512, path),
        max_width=_positive(stored, "max_width", 12, path),
        max_words=_positive(stored, "max_len", 384, path),
        layers=max(0, int(stored.get("num_rnn_layers", 1))),
        ent_token=str(stored.get("ent_token", "<<ENT>>")),
        sep_token=str(stored.get("sep_token", "<<SEP>>")),
        marks_label=bool(stored.get("embed_ent_token", True)),
    )


def _encoder_at(base: str, name: str) -> Path:
    """The folder of the encoder that a GLiNER was made of."""
    try:
        return resolve_texts(base)
    except ModelLoadError as error:
        raise ModelLoadError(
            f"{name} is a GLiNER, and its encoder, {base}, whose tokenizer and config.json it needs, is not at hand "
            f"({error}); fetch that, or write where it is into model_name of {CONFIG}"
        ) from error


def is_gliner2(folder: Path) -> bool:
    """Whether config.json is that of a GLiNER2."""
    path = folder / "config.json"
    return path.is_file() and read_json_object(path).get("model_type") == "extractor"


def read_gliner2(folder: Path, name: str) -> Gliner:
    """The layout of a GLiNER2, whose encoder's config.json has a folder of its own; raises as :func:`read_gliner`."""
    path = folder / "config.json"
    stored = read_json_object(path)
    known = (
        ("architecture", "span", ("span",)),
        ("counting_layer", "count_lstm", get_args(Counting)),
        ("token_pooling", "first", ("first",)),
    )
    _check_fields(stored, known, name, path.name)
    config = read_json_object(folder / "encoder_config" / "config.json")
    return Gliner(
        folder=folder,
        tokenizer=folder,
        config=_encoder_config(folder, config, _BACKBONE2, name),
        span_mode="markerV0",
        hidden_size=_positive(config, "hidden_size", 0, path),
        max_width=_positive(stored, "max_width", 8, path),
        max_words=_WORDS2,
        layers=0,
        ent_token="[E]",
        sep_token="[SEP_TEXT]",
        marks_label=True,
        backbone=_BACKBONE2,
        counting=stored.get("counting_layer") or "count_lstm",
    )


def _encoder_config(folder: Path, config: Mapping[str, Any], lead: str, name: str) -> dict[str, Any]:
    """An encoder's config.json with the rows that its table has."""
    shapes = tensor_shapes(folder).items()
    tables = [shape[0] for key, shape in shapes if key.startswith(f"{lead}.") and key.endswith(_WORD_TABLES)]
    if not tables:
        raise ModelLoadError(f"{name}: its weights have no encoder, whose tensors begin with {lead}")
    return {**config, "vocab_size": tables[0], "architectures": None}


def of_backbone(tensors: Mapping[str, Any], layout: Gliner | None) -> Mapping[str, Any]:
    """The encoder's tensors of a GLiNER under the encoder's own names; of another checkpoint, all as they are."""
    if layout is None:
        return tensors
    lead = f"{layout.backbone}."
    return {name.removeprefix(lead): tensor for name, tensor in tensors.items() if name.startswith(lead)}


def _check_kind(stored: Mapping[str, Any], name: str) -> None:
    for field, kind in _OTHER_KINDS.items():
        if stored.get(field):
            raise UnsupportedArchitectureError(
                f"{name} is {kind} ({field} of {CONFIG}), which millpond does not run; it runs those of one encoder, "
                "such as urchade/gliner_medium-v2.1"
            )
    known = (
        ("span_mode", "markerV0", get_args(SpanMode)),
        ("subtoken_pooling", "first", ("first",)),
        ("words_splitter_type", "whitespace", ("whitespace",)),
        ("model_type", "gliner", ("gliner", "gliner_uni_encoder_span", "gliner_uni_encoder_token")),
    )
    _check_fields(stored, known, name, CONFIG)


def _check_fields(
    stored: Mapping[str, Any], known: tuple[tuple[str, str, tuple[str, ...]], ...], name: str, file: str
) -> None:
    for field, default, values in known:
        value = stored.get(field) or default
        if value not in values:
            raise UnsupportedArchitectureError(
                f"{name} has {field} {value!r} in {file}, which millpond does not run; it runs {', '.join(values)}"
            )


def _positive(stored: Mapping[str, Any], field: str, default: int, path: Path) -> int:
    value = stored.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"{path}: {field} is {value!r}; it must be a positive int")
    return value
