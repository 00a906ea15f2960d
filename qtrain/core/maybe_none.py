"""The type of what is None in cases that the code that reads it has ruled out, by a condition of another value."""

from typing import Any

MaybeNone = Any
"""`X | MaybeNone`: X, or None by a rule that types cannot state and the field's docstring does: which operands a GEMM
reads, what backward saved. The type checker then asks no reader for a check of its own (as typeshed's `MaybeNone`)."""
