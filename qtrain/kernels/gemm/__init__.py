"""Codes x codes -> tensor: an operation per kind of scale (scaled, blockwise, MX) or of code (INT8, INT4, FP16).
`tiling.py`, `persistent.py` and `split_k.py` are the frame that they share."""
