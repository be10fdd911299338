"""Known Matryoshka families: checkpoints that were trained for shorter vectors but do not say so in config.json.

From their model cards; matched by the end of the hub id, or by the folder's name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Family:
    """Checkpoints whose name matches ``pattern`` may be cut to ``dimensions``, or to anything from ``smallest``."""

    pattern: str
    dimensions: tuple[int, ...] | None = None
    smallest: int = 1


MATRYOSHKA_FAMILIES = (
    Family(pattern=r"qwen3-embedding-.*", smallest=32),
    Family(pattern=r"nomic-embed-text-v1\.5", smallest=64),
    Family(pattern=r"nomic-embed-text-v2-moe", smallest=256),
    Family(pattern=r"modernbert-embed-(base|large)", smallest=256),
    Family(pattern=r"mxbai-embed-large-v1", smallest=64),
    Family(pattern=r"snowflake-arctic-embed-(m-v1\.5|m-v2\.0|l-v2\.0)", smallest=256),
    Family(pattern=r"embeddinggemma-300m", dimensions=(128, 256, 512, 768)),
    Family(pattern=r"gte-multilingual-base", smallest=128),
    Family(pattern=r"jina-colbert-v2", dimensions=(64, 96, 128)),
)


def matryoshka_family(*names: str) -> Family | None:
    """The family of a checkpoint called by any of ``names``."""
    for name in names:
        last = name.rstrip("/").rsplit("/", 1)[-1].lower()
        for family in MATRYOSHKA_FAMILIES:
            if re.fullmatch(family.pattern, last):
                return family
    return None
