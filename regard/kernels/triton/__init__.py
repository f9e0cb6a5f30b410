"""Kernels for the GPU in Triton."""
