"""Convolutions of codes as implicit GEMMs: `output` and `grad_input` gather patches, `grad_weight` sums over images."""
