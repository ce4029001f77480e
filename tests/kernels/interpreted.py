"""Triton's interpreter, a third faster; for tests to import where there is no GPU.

For each call of a function within a kernel it replaces the language's functions again, though the launch has done so.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def _patch_all(kernel: object) -> Any:
    """Whatever the kernel's own module imports of it: Triton's functions, like sums, are of another one."""
    return _patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))


def _call(self: Any, *arguments: Any, **options: Any) -> Any:
    return self.rewrite()(*arguments, **options)


if os.environ.get("TRITON_INTERPRET") == "1":
    _patch_lang, interpreter._patch_lang = interpreter._patch_lang, _patch_all
    interpreter.InterpretedFunction.__call__ = _call
