"""The two backends: native kernels, and torch."""
