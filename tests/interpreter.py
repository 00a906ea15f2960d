"""Triton's interpreter without work that it repeats or throws away, which is two thirds of its time; or none."""

import contextlib
import dataclasses
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


def run_compiled(module: str, *arguments: str) -> str:
    """What a module of the tests prints, run in a process whose kernels are not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", module, *arguments]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def quicken_interpreter() -> None:
    """Three things are left out:

    patches of `triton.language`, made for a launch, and the same way again at every call of a function by a kernel;
    a check of every integer sum for overflow, whose result is read in debug mode only; and
    the table of NumPy's dtypes, built anew for every value.
    """
    with contextlib.suppress(ImportError):
        import triton.language as tl
        from triton.runtime import interpreter

        patch, builder = interpreter._patch_lang, interpreter.interpreter_builder
        np_dtype = functools.cache(interpreter._get_np_dtype)

        @functools.cache
        def modules_of(fn: Callable[..., Any]) -> list[ModuleType]:
            return [module for module in (tl, tl.core) if any(module is value for value in fn.__globals__.values())]

        def patch_unless_patched(fn: Callable[..., Any]) -> Any:
            unpatched = any(tl.core.is_builtin(module.load) for module in modules_of(fn))
            return patch(fn) if unpatched else interpreter._LangPatchScope()

        def cached_np_dtype(dtype: Any) -> Any:
            element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
            return np_dtype(tl.uint64 if isinstance(element, tl.pointer_type) else element)

        interpreter._patch_lang = patch_unless_patched
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
        interpreter._get_np_dtype = cached_np_dtype
