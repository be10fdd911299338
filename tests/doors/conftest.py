"""The real model of the tests of doors; and no library of a door tells its makers of them."""

import os

from tests.adapter_models import minilm as minilm

# Read when the libraries are imported, also by the programs that the tests start.
for name, value in {
    "ANONYMIZED_TELEMETRY": "False",  # Chroma
    "DO_NOT_TRACK": "true",  # Daft
    "HAYSTACK_TELEMETRY_ENABLED": "false",
    "RAGAS_DO_NOT_TRACK": "true",
}.items():
    os.environ.setdefault(name, value)
