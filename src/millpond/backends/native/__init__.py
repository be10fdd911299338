"""The native backend: plans of compiled kernels, from tensors. Imports neither torch nor transformers."""
