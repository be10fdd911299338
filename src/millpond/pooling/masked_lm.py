"""MaskedLanguageHead: hidden states to vocabulary logits, in float32, by the names that each family gives its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from millpond.checkpoints.weights import read_tensors
from millpond.errors import UnsupportedArchitectureError, WeightMismatchError


@dataclass(frozen=True, kw_only=True)
class Names:
    """Where a family's language model keeps its head: projection, activation, norm, decoder.

    Attributes:
        backbone: Prefix of the backbone's tensors.
        dense: The projection.
        norm: The norm behind its activation.
        decoder: The product with the vocabulary, absent where it is the embedding table.
        biases: Names of the decoder's bias, the first one there being it.
        table: The embedding table, in the backbone.
        activation: Field of config.json; gelu where it has none.
        epsilon: The norm's, a field too.
        default_epsilon: What counts where config.json leaves it out.
    """

    backbone: str
    dense: str
    norm: str
    decoder: str
    biases: tuple[str, ...]
    table: str = "embeddings.word_embeddings.weight"
    activation: str = ""
    epsilon: str = "layer_norm_eps"
    default_epsilon: float = 1e-12

    def wanted(self) -> tuple[str, ...]:
        """Every tensor that a file may have of this head, under any of its names."""
        parts = [f"{part}.{kind}" for part in (self.dense, self.norm) for kind in ("weight", "bias")]
        older = [f"{self.norm}.gamma", f"{self.norm}.beta"]
        return (*parts, *older, self.decoder, *self.biases, self.table, f"{self.backbone}.{self.table}")


def _roberta(backbone: str) -> Names:
    return Names(
        backbone=backbone,
        dense="lm_head.dense",
        norm="lm_head.layer_norm",
        decoder="lm_head.decoder.weight",
        biases=("lm_head.decoder.bias", "lm_head.bias"),
    )


FAMILIES = {
    "bert": Names(
        backbone="bert",
        dense="cls.predictions.transform.dense",
        norm="cls.predictions.transform.LayerNorm",
        decoder="cls.predictions.decoder.weight",
        biases=("cls.predictions.decoder.bias", "cls.predictions.bias"),
        activation="hidden_act",
    ),
    "distilbert": Names(
        backbone="distilbert",
        dense="vocab_transform",
        norm="vocab_layer_norm",
        decoder="vocab_projector.weight",
        biases=("vocab_projector.bias",),
        activation="activation",
        epsilon="",
    ),
    "roberta": _roberta("roberta"),
    "xlm-roberta": _roberta("roberta"),
    "mpnet": _roberta("mpnet"),
    "modernbert": Names(
        backbone="model",
        dense="head.dense",
        norm="head.norm",
        decoder="decoder.weight",
        biases=("decoder.bias",),
        table="embeddings.tok_embeddings.weight",
        activation="classifier_activation",
        epsilon="norm_eps",
        default_epsilon=1e-5,
    ),
}


class MaskedLanguageHead(nn.Module):
    """``decoder(norm(activation(dense(x))))``."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], activation: str, epsilon: float) -> None:
        super().__init__()
        from transformers.activations import ACT2FN

        for name in ("dense", "dense_bias", "norm", "norm_bias", "decoder", "decoder_bias"):
            tensor = tensors.get(name)
            self.register_buffer(name, None if tensor is None else tensor.float(), persistent=False)
        self.epsilon = epsilon
        self.activate = ACT2FN[activation]

    @property
    def vocabulary(self) -> int:
        """Columns of the logits."""
        assert isinstance(self.decoder, torch.Tensor)
        return self.decoder.shape[0]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # [n, hidden] -> [n, vocabulary]
        """Logits of each row."""
        rows = self.activate(nn.functional.linear(hidden, self.dense, self.dense_bias))  # type: ignore[arg-type]
        rows = nn.functional.layer_norm(rows, rows.shape[-1:], self.norm, self.norm_bias, self.epsilon)  # type: ignore[arg-type]
        return nn.functional.linear(rows, self.decoder, self.decoder_bias)  # type: ignore[arg-type]


def build_masked_head(folder: Path, config: Mapping[str, Any], device: torch.device) -> MaskedLanguageHead:
    """The head of the language model in ``folder``; ``config`` is its config.json.

    Raises:
        UnsupportedArchitectureError: A family whose head millpond does not know.
        WeightMismatchError: The head's tensors are not there, or do not fit each other.
    """
    names = FAMILIES.get(str(config.get("model_type")))
    if names is None:
        raise UnsupportedArchitectureError(
            f"{folder}: millpond knows no masked-language-model head of model_type {config.get('model_type')!r}; "
            f"SPLADE runs over {', '.join(FAMILIES)}"
        )
    held = read_tensors(folder, only=names.wanted())
    parts = {
        "dense": held.get(f"{names.dense}.weight"),
        "dense_bias": held.get(f"{names.dense}.bias"),
        "norm": held.get(f"{names.norm}.weight", held.get(f"{names.norm}.gamma")),
        "norm_bias": held.get(f"{names.norm}.bias", held.get(f"{names.norm}.beta")),
        "decoder": held.get(names.decoder, held.get(f"{names.backbone}.{names.table}", held.get(names.table))),
        "decoder_bias": next((held[name] for name in names.biases if name in held), None),
    }
    needed = {"dense": f"{names.dense}.weight", "norm": f"{names.norm}.weight", "decoder": names.decoder}
    for part, name in needed.items():
        if parts[part] is None:
            raise WeightMismatchError(
                f"{folder} has no {name}: it is no masked language model, and SPLADE reads its weights off that head"
            )
    tensors = {part: tensor for part, tensor in parts.items() if tensor is not None}
    _check_shapes(tensors, folder)
    activation = str(config.get(names.activation, "gelu"))
    head = MaskedLanguageHead(tensors, activation, float(config.get(names.epsilon, names.default_epsilon)))
    return head.to(device).eval()


def _check_shapes(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    vocabulary, width = tensors["decoder"].shape
    shapes = {
        "dense": (width, tensors["dense"].shape[1]),
        "dense_bias": (width,),
        "norm": (width,),
        "norm_bias": (width,),
        "decoder_bias": (vocabulary,),
    }
    for name, shape in shapes.items():
        if name in tensors and tuple(tensors[name].shape) != shape:
            raise WeightMismatchError(
                f"{folder}: the masked-language-model head's {name} is {tuple(tensors[name].shape)}, not {shape}; "
                "check that the files belong together"
            )
