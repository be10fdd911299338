"""A tiny sparse model, beside the models of all adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.adapter_models import (
    cross_encoder as cross_encoder,
)
from tests.adapter_models import (
    cross_encoder_engine as cross_encoder_engine,
)
from tests.adapter_models import (
    engine as engine,
)
from tests.adapter_models import (
    m3 as m3,
)
from tests.adapter_models import (
    minilm as minilm,
)
from tests.adapter_models import (
    prompted as prompted,
)
from tests.adapter_models import (
    prompted_engine as prompted_engine,
)
from tests.adapter_models import (
    prompted_splade as prompted_splade,
)
from tests.adapter_models import (
    splade_engine as splade_engine,
)
from tests.adapter_models import (
    texts as texts,
)
from tests.tiny.heads import write_splade


@pytest.fixture(scope="session")
def splade(checkpoint_of: Callable[..., Path]) -> str:
    return str(checkpoint_of(write_splade))
