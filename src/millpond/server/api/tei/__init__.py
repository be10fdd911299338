"""The routes of Text Embeddings Inference (TEI)."""
