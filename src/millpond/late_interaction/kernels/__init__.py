"""Kernels of late interaction: each calls the compiled function of ``native/``, or computes the same with numpy."""
