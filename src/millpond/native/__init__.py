"""Kernels in C++ for processors with AVX512-BF16; without them torch's operators compute the same."""
