"""Pooling methods and heads: hidden states to vectors, logits and sparse weights."""
