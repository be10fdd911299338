"""Weights as the kernels read them: packed from a checkpoint's files, and kept on disk."""
