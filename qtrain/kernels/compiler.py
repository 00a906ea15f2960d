"""Triton, if it is installed. Without it (no Linux, no GPU) kernels can be defined, and only a launch fails."""

try:
    import triton
    import triton.language as tl
except ImportError:

    class _Absent:
        """Stands for triton and triton.language at import time: decorators pass, a launch says what is missing."""

        @staticmethod
        def constexpr(value: object) -> object:
            return value

        @staticmethod
        def jit(function=None, **options):
            return function if function is not None else lambda decorated: decorated

        def __getattr__(self, name: str):
            raise RuntimeError("this kernel needs triton, which is not installed: pip install triton")

    triton = tl = _Absent()

__all__ = ["tl", "triton"]
