"""Runs the function of a task on encoded arguments and encodes what comes of it.

Invariant: a call returns a reply for every input, or raises `MemoryError`, at which its process ends.
"""

import time
from collections.abc import Callable
from importlib import import_module
from inspect import signature
from typing import Any, get_type_hints

import msgspec

from loraplex.platform.workers.messages import Done, Failed, Refused, encode


def load_function(name: str, setup: bytes | None) -> Callable[..., Any]:
    """Import "module:name"; with a `setup`, call that and return the function it returns."""
    module, _, attribute = name.partition(":")
    function: Callable[..., Any] = getattr(import_module(module), attribute)
    if setup is None:
        return function
    prepared: Callable[..., Any] = function(*argument_decoder(function)(setup))
    return prepared


def argument_decoder(function: Callable[..., Any]) -> Callable[[bytes | msgspec.Raw], tuple[Any, ...]]:
    """Return the decoder of a tuple of arguments, as `function` annotates them."""
    hints = get_type_hints(function)
    kinds = tuple(hints[name] for name in signature(function).parameters)
    return msgspec.msgpack.Decoder(tuple.__class_getitem__(kinds)).decode


class TaskFunction:
    """The function of one task, and the names of the error classes that its inputs cause."""

    def __init__(self, function: Callable[..., Any], refusals: frozenset[str]) -> None:
        self._function = function
        self._refusals = refusals
        self._decode = argument_decoder(function)

    def __call__(self, payload: bytes | msgspec.Raw) -> bytes:
        """Return the encoded reply. Raises `MemoryError`."""
        begun = time.process_time()
        try:
            result = self._function(*self._decode(payload))
            cpu_s = time.process_time() - begun
            return encode(Done(result, cpu_s))
        except MemoryError:
            raise
        # A panic of a Rust library is not an `Exception`.
        except BaseException as error:  # noqa: BLE001
            return encode(self._reply_to(error))

    def _reply_to(self, error: BaseException) -> Refused | Failed:
        for cls in type(error).__mro__:
            if cls.__name__ in self._refusals:
                texts: list[Any] = [
                    str(error),
                    getattr(error, "param", None),
                    getattr(error, "pointer", None),
                ]
                # No message can have a lone surrogate.
                return Refused(
                    cls.__name__, *(text and text.encode(errors="replace").decode() for text in texts)
                )
        return Failed(type(error).__name__)
