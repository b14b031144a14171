"""Kernels on small odd shapes and exact allocations, to be run under NVIDIA's compute-sanitizer."""
