"""Triton where there is one. Elsewhere (no Linux, no GPU) kernels are still defined, and only launching one fails."""

try:
    import triton
    import triton.language as tl
except ImportError:

    class _Absent:
        """Stands for triton and triton.language at import time: decorators pass, launches say what is missing."""

        constexpr = object

        @staticmethod
        def jit(function=None, **options):
            return function if function is not None else lambda decorated: decorated

        def __getattr__(self, name: str):
            raise RuntimeError("this kernel needs triton, which is not installed: pip install triton")

    triton = tl = _Absent()

__all__ = ["tl", "triton"]
