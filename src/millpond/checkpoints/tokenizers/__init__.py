"""Tokenizers of checkpoints, built with the library tokenizers alone."""
