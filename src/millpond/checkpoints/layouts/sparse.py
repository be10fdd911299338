"""Sparse checkpoints: how they weigh vocabulary entries, and which files describe it.

SPLADE takes the weights from a masked-language-model head (sentence-transformers' ``SpladePooling``, or a plain
repository that the user declares one). BGE-M3 has two more linear layers in separate files besides its dense backbone:
one gives a weight for each token, one a vector for each token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from millpond.checkpoints.resolve import read_json_object
from millpond.errors import ModelLoadError

Strategy = Literal["max", "sum"]
Saturation = Literal["relu", "log1p_relu"]

WEIGHT_FILE, VECTOR_FILE = "sparse_linear.pt", "colbert_linear.pt"
# Special tokens without a weight, as in BGE-M3's own code.
_UNUSED = ("cls_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True, kw_only=True)
class Splade:
    """Weights from the vocabulary's logits: ``log1p(relu(logits))`` pooled over a text's tokens."""

    folder: Path  # the folder of the language model's tensors
    strategy: Strategy = "max"  # how tokens are pooled: `max` (SPLADE v2 and later) or `sum`
    activation: Saturation = "relu"  # `log1p_relu` takes the logarithm twice, as OpenSearch's checkpoints do


@dataclass(frozen=True, kw_only=True)
class TokenWeights:
    """BGE-M3's token weights: ``relu(linear(hidden))``; a repeated token has the largest."""

    path: Path  # the layer's file
    unused: tuple[int, ...]  # ids of the special tokens that have no weight


@dataclass(frozen=True, kw_only=True)
class TokenVectors:
    """BGE-M3's vectors for late interaction: ``linear(hidden)`` of every token but the first, normalized.

    Unlike a token head, this projection does not affect the pooled vector.
    """

    path: Path


@dataclass(frozen=True, kw_only=True)
class StaticWeights:
    """A weight for each entry of the vocabulary, such as its IDF: that of a text's tokens, however often they occur."""

    folder: Path  # of the tokenizer
    idf: Path | None  # JSON, a weight by token; `None`: the tensor `weight` of the folder


@dataclass(frozen=True, kw_only=True)
class SparseCode:
    """CSR's code of a pooled vector: ``relu((x - pre_bias) W^T + latent_bias)``, of which the largest are kept.

    With ``standardized`` the vector's mean is subtracted and it is divided by its deviation first.
    """

    folder: Path  # of the tensors
    in_features: int
    out_features: int  # entries of the code
    most: int  # entries that are kept, if the checkpoint names no other number
    standardized: bool

    def shapes(self) -> dict[tuple[str, ...], tuple[int, ...]]:
        """The tensors of the folder, each under its names, and their shapes; the decoder is the encoder transposed."""
        shape = self.out_features, self.in_features
        weight = ("encoder.weight", "decoder.linear.weight")
        return {weight: shape, ("pre_bias",): shape[1:], ("latent_bias",): shape[:1]}


Sparse = Splade | TokenWeights | StaticWeights | SparseCode


def read_sparse_code(folder: Path) -> SparseCode:
    """sentence-transformers' SparseAutoEncoder."""
    path = folder / "config.json"
    config = read_json_object(path)
    try:
        widths = int(config["input_dim"]), int(config.get("hidden_dim", 512))
        most = int(config.get("k", 8))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{path} must give input_dim, hidden_dim and k as ints") from error
    standardized = bool(config.get("normalize", False))
    return SparseCode(
        folder=folder, in_features=widths[0], out_features=widths[1], most=most, standardized=standardized
    )


def read_static_weights(folder: Path) -> StaticWeights:
    """sentence-transformers' SparseStaticEmbedding; its path to a file of IDFs is of the machine it was saved on."""
    path = read_json_object(folder / "config.json", optional=True).get("path")
    if path is None or not str(path).endswith(".json"):
        return StaticWeights(folder=folder, idf=None)
    places = (folder / str(path), folder / Path(str(path)).name, folder.parent / Path(str(path)).name)
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise ModelLoadError(f"{folder / 'config.json'} names {path}, which is not in the checkpoint; fetch it too")
    return StaticWeights(folder=folder, idf=found)


def names_splade(config: Mapping[str, Any]) -> bool:
    """Whether config.json (or ``hf_overrides``) names vLLM's SPLADE class of a plain masked language model."""
    names = config.get("architectures") or [""]
    return str(names[0]).endswith("SpladeSparseEmbeddingModel")


def read_splade(modules: Sequence[tuple[str, Path]], listed: Path) -> Splade:
    """The SPLADE that modules.json lists, the backbone first."""
    names = [name for name, _ in modules]
    if names[1:] != ["SpladePooling"] or names[0] not in ("Transformer", "MLMTransformer"):
        raise ModelLoadError(
            f"{listed} lists {', '.join(names)}; of SparseEncoder checkpoints millpond runs Transformer, SpladePooling "
            "and Transformer, Pooling, SparseAutoEncoder"
        )
    (_, transformer), (_, pooling) = modules
    path = transformer / "sentence_bert_config.json"
    default = "fill-mask" if names[0] == "MLMTransformer" else "feature-extraction"
    task = read_json_object(path, optional=True).get("transformer_task", default)
    if task != "fill-mask":
        raise ModelLoadError(
            f"{path}: a Transformer of transformer_task {task!r} gives SpladePooling no vocabulary logits; "
            "it must be 'fill-mask'"
        )
    path = pooling / "config.json"
    config = read_json_object(path)
    strategy = _one_of(config.get("pooling_strategy", "max"), ("max", "sum"), "pooling_strategy", path)
    activation = _one_of(config.get("activation_function", "relu"), ("relu", "log1p_relu"), "activation_function", path)
    return Splade(folder=transformer, strategy=cast("Strategy", strategy), activation=cast("Saturation", activation))


def _one_of(value: Any, known: tuple[str, ...], name: str, path: Path) -> Any:
    if value not in known:
        raise ModelLoadError(f"{path}: {name} {value!r} is unknown; millpond has {', '.join(known)}")
    return value


def read_token_weights(folder: Path, transformer: Path) -> TokenWeights | None:
    """BGE-M3's token weights, if ``folder`` has them."""
    path = _layer_file(folder, WEIGHT_FILE)
    return None if path is None else TokenWeights(path=path, unused=_unused_ids(transformer))


def read_token_vectors(folder: Path) -> TokenVectors | None:
    """BGE-M3's vectors for late interaction, if ``folder`` has them."""
    path = _layer_file(folder, VECTOR_FILE)
    return None if path is None else TokenVectors(path=path)


def _layer_file(folder: Path, name: str) -> Path | None:
    """The file of a layer: the safetensors that `millpond convert` wrote of it, or the pickle."""
    paths = ((folder / name).with_suffix(".safetensors"), folder / name)
    return next((path for path in paths if path.is_file()), None)


def _unused_ids(transformer: Path) -> tuple[int, ...]:
    """Ids of the special tokens that have no weight; roles that the tokenizer does not define are skipped."""
    roles = {
        **read_json_object(transformer / "tokenizer_config.json", optional=True),
        **read_json_object(transformer / "special_tokens_map.json", optional=True),
    }
    path = transformer / "tokenizer.json"
    tokens = [role["content"] if isinstance(role, dict) else role for name in _UNUSED if (role := roles.get(name))]
    ids = {token["content"]: int(token["id"]) for token in read_json_object(path).get("added_tokens", ())}
    missing = [token for token in tokens if token not in ids]
    if missing or not tokens:
        raise ModelLoadError(
            f"{path} has no added token {missing[0] if missing else 'at all'}; {WEIGHT_FILE} needs the ids of the "
            "tokenizer's special tokens, to give them no weight"
        )
    return tuple(sorted({ids[token] for token in tokens}))
