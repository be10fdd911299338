"""Heads: everything behind a backbone, in numpy and compiled kernels."""
