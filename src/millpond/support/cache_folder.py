"""Where millpond keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``millpond`` in ``XDG_CACHE_HOME``, else in ``~/.cache``; it may not be there yet."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(home) if os.path.isabs(home) else Path.home() / ".cache") / "millpond"
