"""The checkpoint that the load generator's own server serves."""

from tests.server.conftest import embedder as embedder
