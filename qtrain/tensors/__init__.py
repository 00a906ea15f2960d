"""Tensors in low bits: codes with their scales as one GEMM reads them, and weights that are stored so."""
