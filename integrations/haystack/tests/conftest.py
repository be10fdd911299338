"""The models of all adapters; without Haystack nothing of this folder is collected."""

from __future__ import annotations

from importlib.util import find_spec

from tests.adapter_models import cross_encoder as cross_encoder
from tests.adapter_models import cross_encoder_engine as cross_encoder_engine
from tests.adapter_models import engine as engine
from tests.adapter_models import minilm as minilm
from tests.adapter_models import prompted as prompted
from tests.adapter_models import prompted_engine as prompted_engine
from tests.adapter_models import prompted_splade as prompted_splade
from tests.adapter_models import splade_engine as splade_engine
from tests.adapter_models import texts as texts

collect_ignore_glob = [] if find_spec("haystack") else ["test_*.py"]
