"""Reference logits of one text or pair: transformers' classifiers in eager mode, or a head implemented here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tests.parity.oracles import oracle

Logits = Callable[..., torch.Tensor]  # (ids [n], token types [n] or None) -> [labels], or [n, labels] by token


def classifier(folder: Path, **overrides: Any) -> Logits:
    """The reference of the classifier in ``folder``, in float32, one text at a time.

    Args:
        folder: A checkpoint with a ``*ForSequenceClassification`` or ``*ForTokenClassification`` head.
        overrides: Config fields for transformers' class.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    first_linear = _WRITTEN_OUT.get(_kind(config))
    if first_linear is not None:
        return _written_out(folder, config, first_linear)
    import transformers

    model = (
        getattr(transformers, config["architectures"][0])
        .from_pretrained(folder, attn_implementation="eager", dtype=torch.float32, local_files_only=True, **overrides)
        .eval()
    )

    @torch.inference_mode()
    def logits(ids: torch.Tensor, types: torch.Tensor | None = None) -> torch.Tensor:
        more = {} if types is None else {"token_type_ids": types[None]}
        out: torch.Tensor = model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], **more).logits[0]
        return out

    return logits


# Families whose original tensor names transformers' classifiers do not read: name of the sequence head's first linear.
_WRITTEN_OUT = {
    "nomic_bert": "bert.pooler.dense",
    "new": "new.pooler.dense",
    "gte": "new.pooler.dense",
    "rotary": "classifier.dense",
}


def _kind(config: dict[str, Any]) -> str:
    rotary = config["model_type"] == "xlm-roberta" and config.get("position_embedding_type") == "rotary"
    return "rotary" if rotary else str(config["model_type"])


def _written_out(folder: Path, config: dict[str, Any], first: str) -> Logits:
    """Sequence head: two linears with tanh between them, over the first token. Token head: one linear per token."""
    states, tensors = oracle(folder), load_file(folder / "model.safetensors")

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"])

    last = "classifier.out_proj" if "classifier.out_proj.weight" in tensors else "classifier"

    @torch.inference_mode()
    def logits(ids: torch.Tensor, types: torch.Tensor | None = None) -> torch.Tensor:
        assert types is None
        hidden = states(ids)
        if "Token" in config["architectures"][0]:
            return linear(hidden, "classifier")
        return linear(linear(hidden[0], first).tanh(), last)

    return logits
