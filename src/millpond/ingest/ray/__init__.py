"""Ingestion on a Ray cluster: every worker has an engine; rows, ids and reports are those of a local run.

::

    from millpond.ingest.ray import embed_dataset, ingest_dataset

    vectors = embed_dataset(ray.data.read_parquet("s3://corpus/"), model="BAAI/bge-base-en-v1.5", num_gpus=0.5)
    report = ingest_dataset("corpus.jsonl", model="BAAI/bge-base-en-v1.5", sink=url, workers=8)
"""

from millpond.errors import MissingExtraError

try:
    import ray as _ray  # noqa: F401
    import ray.data as _data  # noqa: F401
except ImportError as error:
    raise MissingExtraError("ingestion on a Ray cluster needs ray: pip install 'millpond[ray]'") from error

from millpond.ingest.ray.dataset import DatasetReader, embed_dataset
from millpond.ingest.ray.ingestion import ingest_dataset

__all__ = ["DatasetReader", "embed_dataset", "ingest_dataset"]
