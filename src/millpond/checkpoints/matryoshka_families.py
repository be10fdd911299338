"""Matryoshka families: checkpoints that were trained for shorter vectors but do not say so in config.json.

The widths are those of the model cards. A checkpoint is matched by the last part of its hub id or path.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MatryoshkaFamily:
    """Checkpoints whose name matches ``pattern`` may be cut to ``dimensions``, or to anything from ``smallest``."""

    pattern: str
    dimensions: tuple[int, ...] | None = None
    smallest: int = 1


MATRYOSHKA_FAMILIES = (
    MatryoshkaFamily(pattern=r"qwen3-embedding-.*", smallest=32),
    MatryoshkaFamily(pattern=r"nomic-embed-text-v1\.5", smallest=64),
    MatryoshkaFamily(pattern=r"nomic-embed-text-v2-moe", smallest=256),
    MatryoshkaFamily(pattern=r"modernbert-embed-(base|large)", smallest=256),
    MatryoshkaFamily(pattern=r"mxbai-embed-large-v1", smallest=64),
    MatryoshkaFamily(pattern=r"snowflake-arctic-embed-(m-v1\.5|m-v2\.0|l-v2\.0)", smallest=256),
    MatryoshkaFamily(pattern=r"embeddinggemma-300m", dimensions=(128, 256, 512, 768)),
    MatryoshkaFamily(pattern=r"gte-multilingual-base", smallest=128),
    MatryoshkaFamily(pattern=r"jina-colbert-v2", dimensions=(64, 96, 128)),
)


def matryoshka_family(*names: str) -> MatryoshkaFamily | None:
    """The family of a checkpoint that has one of ``names``."""
    for name in names:
        last = name.rstrip("/").rsplit("/", 1)[-1].lower()
        for family in MATRYOSHKA_FAMILIES:
            if re.fullmatch(family.pattern, last):
                return family
    return None
