"""Kernels in C++, for processors with AVX512 in bfloat16; without them torch's operators do the same work."""
