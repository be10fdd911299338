"""The torch backend's backbones of checkpoints, and their states."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.variants import LENGTHS, Ints, Rows, described, some_ids
from torch import nn

from millpond.backends.torch.attention.segments import Segments
from millpond.backends.torch.loading.load import load_backbone


def backbone(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """The backbone that the torch backend loads; ``packed=False``: transformers' class."""
    checkpoint, row = described(folder)
    return load_backbone(checkpoint, row, device=torch.device("cpu"), dtype=dtype, **options)


@torch.inference_mode()
def states(
    module: nn.Module,
    lengths: tuple[int, ...] = LENGTHS,
    types: Ints | None = None,
    *,
    offset: int = 0,
    adapters: Sequence[int] | Ints | None = None,
) -> Rows:
    """``[tokens, hidden]``; ``types [tokens]``, ``adapters [texts]``."""
    positions = torch.cat([torch.arange(length) + offset for length in lengths])[None]
    row: dict[str, Any] = {"position_ids": positions, "segments": Segments.of(lengths)}
    if types is not None:
        row["token_type_ids"] = torch.from_numpy(types).long()[None]
    if adapters is not None:
        row["adapter_ids"] = torch.from_numpy(np.repeat(adapters, lengths)).long()[None]
    ids = torch.from_numpy(some_ids(lengths)).long()[None]
    out: Rows = module(input_ids=ids, **row).last_hidden_state[0].float().numpy()
    return out


@cache
def expected_states(folder: Path, lengths: tuple[int, ...] = LENGTHS, *, offset: int = 0) -> Rows:
    """Those of transformers' class in float32."""
    module = backbone(folder, packed=False)
    assert type(module).__module__.startswith("transformers.")
    return states(module, lengths, offset=offset)
