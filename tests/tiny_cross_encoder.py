"""A tiny cross-encoder, saved by transformers: a BERT for text pairs with a pooler and one logit."""

from __future__ import annotations

import json
from pathlib import Path

from tests.tiny import write_checkpoint


def write_cross_encoder(folder: Path, *, activation: str | None = "Identity", seed: int = 3) -> Path:
    """Write a cross-encoder into ``folder``.

    Args:
        folder: Its folder, which is created.
        activation: Name of the activation class that config.json names, as in the ms-marco models; ``None``: none.
        seed: Seed of all weights.
    """
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    write_checkpoint(folder, "bert", lowercase=True)
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = BertConfig.from_dict({**content, "num_labels": 1})
    torch.manual_seed(seed)
    model = BertForSequenceClassification(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:  # with transformers' initial scale, all pairs would have nearly the same score
                parameter.copy_(torch.randn_like(parameter) * 0.5)
    model.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if activation is not None:
        saved["sentence_transformers"] = {"activation_fn": f"torch.nn.modules.linear.{activation}"}
    (folder / "config.json").write_text(json.dumps(saved), encoding="utf-8")
    return folder
