"""Triton, if it is installed. Without it (no Linux, no GPU) kernels can be defined, and only a launch fails."""

try:
    import triton
    import triton.language as tl
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
except ImportError:

    class _Absent:
        """Stands for Triton and Gluon at import time: decorators pass, a launch says what is missing."""

        @staticmethod
        def constexpr(value: object) -> object:
            return value

        @staticmethod
        def jit(function=None, **options):
            return function if function is not None else lambda decorated: decorated

        def __getattr__(self, name: str):
            raise RuntimeError("this kernel needs triton, which is not installed: pip install triton")

    triton = tl = gluon = gl = hopper = _Absent()

__all__ = ["gl", "gluon", "hopper", "tl", "triton"]
