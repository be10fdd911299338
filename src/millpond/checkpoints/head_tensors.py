"""Which of a checkpoint's tensors are heads: a backbone leaves them alone."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

from millpond.checkpoints.architecture import Architecture

logger = logging.getLogger(__name__)

# Heads of other tasks, and buffers of older versions.
_NOT_BACKBONE = re.compile(
    r"^(pooler|cls|lm_head|classifier|score|qa_outputs|pre_classifier|vocab_\w+|head|decoder|embed_out)\."
    r"|^(v_head|output|dense|(lm_|mask_|discriminator_|generator_)?predictions|generator_lm_head|sop_classifier)\."
    r"|^(colbert_)?linear\.|^projector\.|^(multiple_choice_head|multi_vector_head|unembedding_projection|latent_attention_model)\.|(^|\.)(attn|attention)\.(masked_)?bias$"
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


def parts_unread(unread: Iterable[str], read: Iterable[str], name: str) -> list[str]:
    """Those of a checkpoint's ``unread`` tensors that would be parts of its backbone, whose ``read`` ones are known.

    The others, which lie beside it, change nothing, and are named in one line of the log, as transformers does.
    """
    unread, own = list(unread), {tensor.partition(".")[0] for tensor in read}
    parts = [tensor for tensor in unread if own.intersection(tensor.split(".")[:-1])]
    beside = sorted(set(unread).difference(parts))
    if beside:
        more = f" and {len(beside) - 3} more tensors" if len(beside) > 3 else ""
        logger.warning("%s: no part of the model reads %s%s", name, ", ".join(beside[:3]), more)
    return sorted(parts)
