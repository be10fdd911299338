"""A load generator for HTTP servers of embeddings, scores and rankings."""
