"""Which of a checkpoint's tensors are heads: a backbone leaves them alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from millpond.checkpoints.architecture import Architecture

# Heads of other tasks, and buffers of older versions.
_NOT_BACKBONE = re.compile(
    r"^(pooler|cls|lm_head|classifier|score|qa_outputs|pre_classifier|vocab_\w+|head|decoder|embed_out)\."
    r"|^(v_head|output|dense|(lm_|mask_|discriminator_|generator_)?predictions|generator_lm_head|sop_classifier)\."
    r"|^(colbert_)?linear\.|^projector\.|^multiple_choice_head\.|(^|\.)(attn|attention)\.(masked_)?bias$"
    r"|^(\w+\.)?pooler\.|(^|\.)position_ids$|(^|\.)token_type_ids$|inv_freq$"
)


_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def is_head_tensor(name: str, architecture: Architecture, config: Mapping[str, Any] | None = None) -> bool:
    """Whether a checkpoint's tensor is no part of its backbone; with ``config``, nor of the layers that are run."""
    heads = architecture.head_names()
    layer = _LAYER.search(name)
    if layer is not None and config is not None and "cutoff_layers" in config:
        return int(layer[1]) >= int(config["num_hidden_layers"])
    return bool(_NOT_BACKBONE.search(name)) or any(name == head or name.startswith(f"{head}.") for head in heads)
