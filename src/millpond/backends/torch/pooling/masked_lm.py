"""MaskedLanguageHead: hidden states to vocabulary logits, in float32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from millpond.backends.torch.weights import read_tensors
from millpond.checkpoints import architectures
from millpond.checkpoints.families.renaming import wrapped_head
from millpond.checkpoints.weights import tensor_shapes
from millpond.errors import UnsupportedArchitectureError, WeightMismatchError


class MaskedLanguageHead(nn.Module):
    """``decoder(norm(activation(dense(x))))``, or ``decoder(x)``."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], activation: str, epsilon: float) -> None:
        super().__init__()
        from transformers.activations import ACT2FN

        for name in ("dense", "dense_bias", "norm", "norm_bias", "decoder", "decoder_bias"):
            tensor = tensors.get(name)
            self.register_buffer(name, None if tensor is None else tensor.float(), persistent=False)
        self.epsilon = epsilon
        self._half: tuple[torch.Tensor, torch.Tensor | None] | None = None  # decoder and bias in float16
        self.activate = ACT2FN[activation]

    @property
    def vocabulary(self) -> int:
        """Columns of the logits."""
        assert isinstance(self.decoder, torch.Tensor)
        return self.decoder.shape[0]

    def forward(self, hidden: torch.Tensor, half: bool = False) -> torch.Tensor:  # [n, hidden] -> [n, vocabulary]
        """Logits of each row; ``half``: the product with the vocabulary, and so the logits, are in float16."""
        rows = hidden
        if self.dense is not None:
            rows = self.activate(nn.functional.linear(hidden, self.dense, self.dense_bias))  # type: ignore[arg-type]
            rows = nn.functional.layer_norm(rows, rows.shape[-1:], self.norm, self.norm_bias, self.epsilon)  # type: ignore[arg-type]
        if half:
            if self._half is None:  # on first use: only a GPU needs it
                assert isinstance(self.decoder, torch.Tensor)
                bias = self.decoder_bias
                self._half = self.decoder.half(), bias.half() if isinstance(bias, torch.Tensor) else None
            return nn.functional.linear(rows.half(), *self._half)
        return nn.functional.linear(rows, self.decoder, self.decoder_bias)  # type: ignore[arg-type]


def build_masked_head(folder: Path, config: Mapping[str, Any], device: torch.device) -> MaskedLanguageHead:
    """The head of the language model in ``folder``; ``config`` is its config.json."""
    row = architectures.row_of(str(config.get("model_type")))
    names = None if row is None else row.mlm
    if names is None:
        known = ", ".join(row.model_type for row in architectures.ARCHITECTURES if row.mlm is not None)
        raise UnsupportedArchitectureError(
            f"{folder}: millpond knows no masked-language-model head of model_type {config.get('model_type')!r}; "
            f"SPLADE runs over {known}"
        )
    names = wrapped_head(names, tensor_shapes(folder))
    tensors = read_tensors(folder, only=names.tensors())
    parts = {
        "dense": tensors.get(f"{names.dense}.weight"),
        "dense_bias": tensors.get(f"{names.dense}.bias"),
        "norm": tensors.get(f"{names.norm}.weight", tensors.get(f"{names.norm}.gamma")),
        "norm_bias": tensors.get(f"{names.norm}.bias", tensors.get(f"{names.norm}.beta")),
        "decoder": tensors.get(names.decoder, tensors.get(f"{names.backbone}.{names.table}", tensors.get(names.table))),
        "decoder_bias": next((tensors[name] for name in names.biases if name in tensors), None),
    }
    needed = {"decoder": names.decoder}
    if names.dense:
        needed = {"dense": f"{names.dense}.weight", "norm": f"{names.norm}.weight", **needed}
    for part, name in needed.items():
        if parts[part] is None:
            raise WeightMismatchError(
                f"{folder} has no {name}: it is no masked language model, and SPLADE reads its weights off that head"
            )
    present = {part: tensor for part, tensor in parts.items() if tensor is not None}
    _check_shapes(present, folder)
    activation = str(config.get(names.activation, "gelu"))
    head = MaskedLanguageHead(present, activation, float(config.get(names.epsilon, names.default_epsilon)))
    return head.to(device).eval()


def _check_shapes(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    vocabulary, width = tensors["decoder"].shape
    shapes: dict[str, tuple[int, ...]] = {
        "dense": (width, tensors["dense"].shape[1] if "dense" in tensors else width),
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
