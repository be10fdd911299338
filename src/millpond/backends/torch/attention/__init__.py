"""One packed signature, several kernels."""
