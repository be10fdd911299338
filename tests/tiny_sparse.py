"""Tiny sparse checkpoints in the file layouts of the hub, with the backbones of :mod:`tests.tiny`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from tests.tiny import Layout, Other, Pooling, edit_json, write_checkpoint
from tests.tiny_layouts import Normalize

_OLD = "sentence_transformers.sparse_encoder.models."
_NEW = "sentence_transformers.sparse_encoder.modules.splade_pooling."


def write_splade(
    folder: Path,
    family: str = "bert",
    *,
    style: Literal["old", "new"] = "new",
    strategy: str = "max",
    activation: str = "relu",
    **options: Any,
) -> Path:
    """Write a masked language model followed by SpladePooling; ``options`` are those of ``write_checkpoint``."""
    pooling = Other(
        dotted=(_OLD if style == "old" else _NEW) + "SpladePooling",
        config={"pooling_strategy": strategy, "activation_function": activation, "word_embedding_dimension": None},
    )
    layout = Layout(modules=(pooling,), style=style)
    write_checkpoint(folder, family, sentence_transformers=layout, wrapped=True, **options)
    edit_json(folder / "config_sentence_transformers.json", model_type="SparseEncoder", similarity_fn_name="dot")
    if style == "old":
        modules = json.loads((folder / "modules.json").read_text())
        modules[0]["type"] = _OLD + "MLMTransformer"
        (folder / "modules.json").write_text(json.dumps(modules))
    else:
        edit_json(
            folder / "sentence_bert_config.json",
            transformer_task="fill-mask",
            modality_config={"text": {"method": "forward", "method_output_name": "logits"}},
        )
    return folder


def write_m3(folder: Path, *, colbert_width: int = 48) -> Path:
    """Write a BGE-M3: XLM-R with CLS pooling, and two linear layers in half precision in files beside it."""
    import torch

    layout = Layout(modules=(Pooling(modes=("cls",)), Normalize()), style="old")
    write_checkpoint(folder, "xlm-roberta", sentence_transformers=layout)
    generator = torch.Generator().manual_seed(12)
    for name, rows in (("sparse_linear", 1), ("colbert_linear", colbert_width)):
        weight = torch.randn(rows, 48, generator=generator)  # some tokens get a weight, others zero
        layer = {"weight": weight, "bias": torch.randn(rows, generator=generator) * 0.3}
        torch.save({key: tensor.half() for key, tensor in layer.items()}, folder / f"{name}.pt")
    return folder
