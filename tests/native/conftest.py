"""Checkpoints of the variants."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.variants import write_variant


@pytest.fixture(scope="session")
def folder_of(checkpoint_of: Callable[..., Path]) -> Callable[[str], Path]:
    """The folder of a variant's checkpoint."""
    return lambda variant: checkpoint_of(write_variant, variant)
