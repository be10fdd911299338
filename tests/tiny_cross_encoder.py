"""A tiny cross-encoder, as transformers saves one: a BERT that reads pairs, with its pooler and one logit."""

from __future__ import annotations

import json
from pathlib import Path

from tests.tiny import write_checkpoint


def write_cross_encoder(folder: Path, *, activation: str | None = "Identity", seed: int = 3) -> Path:
    """Write one into ``folder``.

    Args:
        folder: Where; made here.
        activation: The name in ``torch.nn.modules`` that config.json gives, as the ms-marco models' does; ``None``
            gives none.
        seed: Of every weight.
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
            if parameter.ndim == 2:  # at transformers' own scale, every pair would score nearly the same
                parameter.copy_(torch.randn_like(parameter) * 0.5)
    model.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if activation is not None:
        saved["sentence_transformers"] = {"activation_fn": f"torch.nn.modules.linear.{activation}"}
    (folder / "config.json").write_text(json.dumps(saved), encoding="utf-8")
    return folder
