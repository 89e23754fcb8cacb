"""Triton's interpreter without what it does over and over: the same operations on the same numbers, in a part of the time.

Invariant: nothing that can fail a test is left out. Its check for overflow is computed and then dropped by Triton itself,
whose assertions need `debug`, which the interpreter's options leave off.
"""

import dataclasses
from collections.abc import Callable
from types import FunctionType
from typing import Any

from triton import language as tl
from triton.runtime import interpreter


class _Kept:
    """What Triton restores after every launch; in a process that interprets all of them it may stay."""

    def restore(self) -> None:
        pass


def install() -> None:
    """Only for a process whose kernels are all interpreted."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _patched_once(interpreter._patch_lang)
    interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)


def _patched_once(patch: Callable[[FunctionType], Any]) -> Callable[[FunctionType], _Kept]:
    """The language of a module is remapped when its first kernel is launched."""
    kept, patched = _Kept(), set[int]()

    def patch_once(function: FunctionType) -> _Kept:
        module = id(function.__globals__)
        if module not in patched:
            patch(function)
            patched.add(module)
        return kept

    return patch_once


def _remembered(numpy_type: Callable[[tl.dtype], Any]) -> Callable[[tl.dtype], Any]:
    """By the name of a type that is neither a pointer nor a block."""
    by_name: dict[str, Any] = {}

    def remembered(dtype: tl.dtype) -> Any:
        element = dtype.scalar
        if element.is_ptr():
            return numpy_type(element)
        if element.name not in by_name:
            by_name[element.name] = numpy_type(element)
        return by_name[element.name]

    return remembered
