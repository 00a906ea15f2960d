"""Triton's interpreter without work that it repeats."""

import contextlib
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any


def patch_language_once() -> None:
    """Leave out what takes 40% of the interpreter's time: it patches `triton.language` for a launch, and the same way
    again at every call of a function by a kernel."""
    with contextlib.suppress(ImportError):
        import triton.language as tl
        from triton.runtime import interpreter

        patch = interpreter._patch_lang

        @functools.cache
        def modules_of(fn: Callable[..., Any]) -> list[ModuleType]:
            return [module for module in (tl, tl.core) if any(module is value for value in fn.__globals__.values())]

        def patch_unless_patched(fn: Callable[..., Any]) -> Any:
            unpatched = any(tl.core.is_builtin(module.load) for module in modules_of(fn))
            return patch(fn) if unpatched else interpreter._LangPatchScope()

        interpreter._patch_lang = patch_unless_patched
