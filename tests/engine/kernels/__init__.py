"""Kernels against plain torch in float64, in the interpreter of Triton."""
