"""Ingestion on a Ray cluster: every worker has an engine; rows, ids and reports are those of a local run."""

from millpond.errors import MissingExtraError

try:
    import ray as _ray  # noqa: F401
    import ray.data as _data  # noqa: F401
except ImportError as error:
    raise MissingExtraError("ingestion on a Ray cluster needs ray: pip install 'millpond[ray]'") from error

from millpond.ingest.ray.dataset import DatasetReader, embed_dataset
from millpond.ingest.ray.ingestion import ingest_dataset

__all__ = ["DatasetReader", "embed_dataset", "ingest_dataset"]
