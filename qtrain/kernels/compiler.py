"""What every kernel file starts from: Triton, if it is installed, and custom ops.

Without Triton (no Linux, no GPU) kernels can be defined, and only a launch fails.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

try:
    import triton
    import triton.language as tl
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.runtime.jit import DependenciesFinder
    from triton.tools.tensor_descriptor import TensorDescriptor

    # Inductor sets this variable when it first compiles a kernel itself, if nobody has: kernels before that would be
    # cached in one folder and those after it in another, and the next process, with Inductor's code cached, would look
    # for all in the first and compile them again.
    os.environ.setdefault("TRITON_CACHE_DIR", triton.knobs.cache.dir)

    def _with_own_globals(update: Callable) -> Callable:
        """A kernel's key in Triton's cache holds the globals of a function that it calls only if that function's own
        key is known by then (triton 3.6): the same kernel would have several keys, by the order of launches, and be
        compiled again in the next process."""

        def update_hash(self: Any, function: Any) -> None:
            _ = function.cache_key
            update(self, function)

        return update_hash

    DependenciesFinder._update_hash = _with_own_globals(DependenciesFinder._update_hash)
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

    absent: Any = _Absent()
    triton = tl = gluon = gl = hopper = TensorDescriptor = absent

on_trace: Callable[[Callable[..., object], tuple[object, ...]], None] | None = None
"""Is given the function of each custom op that is traced, and the arguments; None: nothing looks at them."""

__all__ = [
    "TensorDescriptor",
    "add_cache_tag",
    "cached_per_device",
    "gl",
    "gluon",
    "hopper",
    "operator",
    "tl",
    "triton",
]


def cached_per_device(make: Callable[[torch.device], Tensor]) -> Callable[[torch.device], Tensor]:
    """Cache the tensor that `make` returns, by device: a real one where an operator is run on fake tensors too."""

    @functools.cache
    @functools.wraps(make)
    def made(device: torch.device) -> Tensor:
        with unset_fake_temporarily():
            return make(device)

    return made


def add_cache_tag(tag: str) -> None:
    """Keep what torch.compile caches from now on apart from what it has cached without this tag, beside any others,
    which the user may have set."""
    config = torch.compiler.config
    if tag not in config.cache_key_tag:
        config.cache_key_tag = f"{config.cache_key_tag} {tag}".strip()


def operator(name: str, fake: Callable, mutates_args: Iterable[str] = ()) -> Callable:
    """Register a function as the custom op `qtrain::name`, which `torch.compile` keeps as one call.

    fake: uninitialized results, for tracing. It names only those of the op's arguments that shapes and dtypes depend
    on, so that a signature is written once.
    """
    read = tuple(inspect.signature(fake).parameters)

    def register(function: Callable) -> Callable:
        op = torch.library.custom_op(f"qtrain::{name}", mutates_args=mutates_args)(function)
        signature = inspect.signature(function)

        @op.register_fake
        def _(*args: object, **kwargs: object) -> object:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            if on_trace is not None:
                on_trace(function, tuple(bound.arguments.values()))
            return fake(*(bound.arguments[argument] for argument in read))

        return op

    return register
