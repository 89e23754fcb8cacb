"""What crosses between a gateway and its preparing process, and what must not."""

import os
import pickle
from functools import partial

import pytest

from loraplex.platform.preparation.messages import (
    LENGTH_BYTES,
    Answer,
    CheckBody,
    frame,
    length,
    read_message,
)


class Calls:
    """Reduces to a call, as hostile pickles do."""

    def __init__(self, *reduced: object) -> None:
        self._reduced = reduced

    def __reduce__(self) -> tuple[object, ...]:
        return self._reduced


def test_a_message_is_framed_by_its_length() -> None:
    data = frame(CheckBody(b"{}"))
    assert length(data[:LENGTH_BYTES]) == len(data) - LENGTH_BYTES
    assert read_message(data[LENGTH_BYTES:]) == CheckBody(b"{}")


@pytest.mark.parametrize(
    "hostile",
    [
        Calls(os.system, ("true",)),
        Calls(partial(os.system), ("true",)),
        Calls(eval, ("1",)),
        Answer(refusal=OSError("not ours")),
    ],
)
def test_only_classes_of_ours_are_named(hostile: object) -> None:
    with pytest.raises(pickle.UnpicklingError, match="may be said here"):
        read_message(pickle.dumps(hostile))


@pytest.mark.parametrize("name", ["os", "spawn_child", "os.system"])
def test_no_module_and_no_function_of_ours_is_named(name: str) -> None:
    module = b"loraplex.grammar.child_process"
    text = name.encode()
    data = b"\x80\x04\x8c" + bytes([len(module)]) + module + b"\x8c" + bytes([len(text)]) + text + b"\x93."
    with pytest.raises(pickle.UnpicklingError, match="may be said here"):
        read_message(data)
