"""CUDA: batches overlapped on streams, and replayed as graphs."""
