"""Families: a checkpoint's config.json and the names of its tensors in the terms of transformers' own classes."""
