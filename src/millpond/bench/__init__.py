"""A load generator for any server of embeddings, scores or rerankings: ``millpond bench-serve``."""
