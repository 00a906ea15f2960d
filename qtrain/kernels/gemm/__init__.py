"""Codes x codes -> tensor: an operation per kind of scale (scaled, blockwise) or of code (INT8, INT4, FP16).
`persistent.py` and `split_k.py` are the frame that they share."""
