"""Kernels in C++ for x86-64 processors; without them torch's operators compute the same."""
