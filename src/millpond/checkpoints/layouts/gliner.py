"""GLiNER: gliner_config.json and one weight file, in which an encoder has a head for labels of the caller's.

An encoder reads the labels, each behind a marker, and then the words of a text; the head compares the states of words,
or of spans between two words, with those of the markers (Zaratiana et al., 2023).
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
BACKBONE = "token_rep_layer.bert_layer.model"  # what precedes the encoder's tensors
# A token that the library adds before its markers; nothing uses it.
_ADDED_FIRST = "[FLERT]"
_WORD_TABLES = ("word_embeddings.weight", "tok_embeddings.weight", "embed_tokens.weight", "shared.weight")
# Tokens of a word at most: the library bounds words only, and the tokenizers of most checkpoints nothing.
_TOKENS_OF_WORD = 16
SpanMode = Literal["markerV0", "marker", "token_level"]
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

    @property
    def added_tokens(self) -> tuple[str, ...]:
        """Tokens that the tokenizer is to have, the markers at the end."""
        return (_ADDED_FIRST, self.ent_token, self.sep_token)

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
        elsewhere = resolve_texts(base)
    config = encoder if isinstance(encoder, dict) else read_json_object(elsewhere / "config.json")
    shapes = tensor_shapes(folder)
    tables = [shape[0] for key, shape in shapes.items() if key.startswith(BACKBONE) and key.endswith(_WORD_TABLES)]
    if not tables:
        raise ModelLoadError(f"{name}: its weights have no encoder, whose tensors begin with {BACKBONE}")
    return Gliner(
        folder=folder,
        tokenizer=folder if own else elsewhere,
        # The library fills in DeBERTa where encoder_config has no model_type. Class names are those of other heads.
        config={"model_type": "deberta-v2", **config, "vocab_size": tables[0], "architectures": None},
        span_mode=stored.get("span_mode", "markerV0"),
        hidden_size=_positive(stored, "hidden_size", 512, path),
        max_width=_positive(stored, "max_width", 12, path),
        max_words=_positive(stored, "max_len", 384, path),
        layers=max(0, int(stored.get("num_rnn_layers", 1))),
        ent_token=str(stored.get("ent_token", "<<ENT>>")),
        sep_token=str(stored.get("sep_token", "<<SEP>>")),
        marks_label=bool(stored.get("embed_ent_token", True)),
    )


def of_backbone(tensors: Mapping[str, Any], layout: Gliner | None) -> Mapping[str, Any]:
    """The encoder's tensors of a GLiNER under the encoder's own names; of another checkpoint, all as they are."""
    if layout is None:
        return tensors
    lead = f"{BACKBONE}."
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
    for field, default, values in known:
        value = stored.get(field) or default
        if value not in values:
            raise UnsupportedArchitectureError(
                f"{name} has {field} {value!r} in {CONFIG}, which millpond does not run; it runs {', '.join(values)}"
            )


def _positive(stored: Mapping[str, Any], field: str, default: int, path: Path) -> int:
    value = stored.get(field, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"{path}: {field} is {value!r}; it must be a positive int")
    return value
