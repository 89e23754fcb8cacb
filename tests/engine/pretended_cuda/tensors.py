"""Tensors that say cuda:0 and hold host memory: every operation on them is checked, timed by clocks, and kept in a capture.

Invariant: an operation that mixes the host's and the device's tensors raises as on a GPU, but for single numbers and
copies. Whatever makes the host wait is written down where it happens.
"""

from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from tests.engine.pretended_cuda.findings import DeviceError
from tests.engine.pretended_cuda.ordering import Extent, StorageRef, extent_of
from tests.engine.pretended_cuda.streams import CUDA, device
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

WAITING = frozenset(
    {
        *("nonzero", "masked_select", "unique_dim", "_unique2", "equal", "is_nonzero", "bincount"),
        *("_local_scalar_dense", "repeat_interleave", "unique_consecutive", "histc"),
    }
)
"""Operations whose result's size or value the host must know."""
FRESH = frozenset({"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"})
COPIES = frozenset({"_to_copy", "to", "copy_"})
INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})

NO_VALUE = -91
"""Of integers that were never written. Floats are NaN."""

NUMBERS = frozenset({"fill_", "masked_fill", "masked_fill_"})
"""Operators, besides those of each element, that take a single number of the host with the launch."""

pinned: dict[int, StorageRef] = {}
"""The storages of pinned memory by address."""


class CudaTensor(Tensor):
    """`host` holds the values."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> Self:
        tensor: Self = Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=CUDA,
        )
        tensor.host = host
        device().ordering.track(host)
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return dispatched(func, args, kwargs or {})


class DeviceMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sends to the device what makes tensors there, and what reads or writes pinned memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatched(func, args, kwargs or {})


def dispatched(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run one operator as a GPU would."""
    flat, _ = tree_flatten((args, kwargs))
    on_device = [t for t in flat if isinstance(t, CudaTensor)]
    on_host = [t for t in flat if isinstance(t, Tensor) and not isinstance(t, CudaTensor)]
    asked = kwargs.get("device")
    if asked is not None and torch.device(asked).type == "meta":
        # CUDA without an index, of which torch has asked the guard that is lent to it.
        kwargs = kwargs | {"device": CUDA}
    to_device = asked is not None and torch.device(asked).type in ("cuda", "meta")
    if not on_device and not to_device:
        return _on_host(func, args, kwargs, on_host)
    name = func.overloadpacket.__name__
    waits = _check(func, name, args, kwargs, on_host)
    return _on_device(func, name, args, kwargs, waits=waits)


def pin(tensor: Tensor) -> Tensor:
    """The same tensor, in pinned memory from now on."""
    device().host_call("an allocation of pinned memory")
    storage = tensor.untyped_storage()
    pinned[storage.data_ptr()] = StorageRef(storage)
    device().ordering.track(tensor)
    return tensor


def is_pinned(tensor: Tensor) -> bool:
    """Whether copies from or to it need not wait."""
    storage = pinned.get(tensor.untyped_storage().data_ptr())
    return storage is not None and not storage.is_freed


def note_host_access(tensor: Tensor, name: str, *, is_write: bool) -> None:
    """The host reads or writes this tensor, if it is in pinned memory."""
    if is_pinned(tensor) and (extent := extent_of(tensor, is_write=is_write)) is not None:
        device().ordering.track(tensor)
        device().ordering.host_access(extent, name)


def _on_host(func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
    name = func.overloadpacket.__name__
    if kwargs.get("pin_memory"):
        return pin(func(*args, **kwargs | {"pin_memory": False}))
    if name not in FRESH and not _is_view(func):
        written = _written(func, args, kwargs)
        for tensor in tensors:
            note_host_access(tensor, name, is_write=any(tensor is other for other in written))
    return func(*args, **kwargs)


def _check(func: Any, name: str, args: Any, kwargs: dict[str, Any], on_host: list[Tensor]) -> bool:
    """Note waits, refuse what a GPU refuses, and say whether the host waits for the result."""
    if name in COPIES:
        return _check_copy(name, args, kwargs)
    if name in WAITING:
        _wait(name)
    if name in INDEXING:
        for index in args[1]:
            if index is not None and not isinstance(index, CudaTensor):
                _wait(f"{name} by an index of the host")
            elif index is not None and index.dtype in (torch.bool, torch.uint8):
                _wait(f"{name} by a mask")
        on_host = [tensor for tensor in on_host if not any(tensor is index for index in args[1])]
        if any(not tensor.dim() for tensor in on_host):
            _wait(f"{name} of a number of the host")
    takes_numbers = torch.Tag.pointwise in func.tags or name in INDEXING or name in NUMBERS
    written = _written(func, args, kwargs)
    refused = [
        tuple(tensor.shape)
        for tensor in on_host
        if tensor.dim() or not takes_numbers or any(tensor is other for other in written)
    ]
    if refused:
        raise DeviceError(f"{func}: tensors of the host {refused} among those of cuda:0")
    return name in WAITING


def _check_copy(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    is_asked_not_to_wait = bool(kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
    host = next((tensor for tensor in args[:2] if isinstance(tensor, Tensor) and tensor.device == CPU), None)
    is_to_host = _is_to_host(name, args, kwargs)
    if host is None and not is_to_host:
        return False
    waits = not is_asked_not_to_wait or host is None or not is_pinned(host)
    if waits:
        _wait(f"{name} {_direction(host, is_to_host=is_to_host)}")
    device().host_call("a copy between host and device")
    return waits


def _direction(host: Tensor | None, *, is_to_host: bool) -> str:
    if is_to_host:
        return "to the host"
    is_blocking = host is not None and is_pinned(host)
    return "to the device, blocking" if is_blocking else "to the device from pageable memory"


def _is_to_host(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    if name == "copy_":
        return not isinstance(args[0], CudaTensor)
    asked = kwargs.get("device")
    return asked is not None and torch.device(asked).type == "cpu"


CPU = torch.device("cpu")


def _wait(kind: str) -> None:
    state = device()
    state.host_call(kind)
    state.findings.wait(kind)
    state.ordering.host_waited(state.current.clock)


def _on_device(func: Any, name: str, args: Any, kwargs: dict[str, Any], *, waits: bool) -> Any:
    flat = kwargs | ({"device": CPU} if "device" in kwargs else {})
    flat.pop("pin_memory", None)
    host_args, host_kwargs = tree_map(host_of, (args, flat))
    given = _written(func, args, kwargs)
    written = [host_of(tensor) for tensor in given]
    state = device()
    # A capture runs nothing: what is there stays.
    kept = [tensor.clone() for tensor in written] if state.capturing else []
    out = func(*host_args, **host_kwargs)
    for tensor, before in zip(written, kept, strict=bool(kept)):
        tensor.copy_(before)
    if name in FRESH:
        _poison(out)
    elif not _is_view(func):
        _launch(func, name, host_args, host_kwargs, out, written)
        if waits:
            state.ordering.host_waited(state.current.clock)
    if not func._schema.returns:
        return None
    if given:
        return given[0] if len(given) == 1 else args[0]
    is_on_host = name in COPIES and _is_to_host(name, args, kwargs)
    return out if is_on_host else tree_map(_wrapped, out)


def _launch(func: Any, name: str, args: Any, kwargs: Any, out: Any, written: list[Tensor]) -> None:
    """Order the operation after others on its stream, and keep it for replays."""
    state, stream = device(), device().current
    extents = [*_extents((args, kwargs), written), *_results(out, written)]
    state.ordering.launched(stream.clock, stream.name, [] if state.capturing else extents, name)
    state.taped(_again(func, args, kwargs, out, written, extents, stream, name))


def _again(
    func: Any,
    args: Any,
    kwargs: Any,
    out: Any,
    written: list[Tensor],
    extents: list[Extent],
    stream: Any,
    name: str,
) -> Callable[[], None]:
    """The same operation on the memory of the capture."""

    def again() -> None:
        device().ordering.launched(stream.clock, stream.name, extents, name)
        new = func(*args, **kwargs)
        if not written:
            for old, fresh in zip(tree_flatten(out)[0], tree_flatten(new)[0], strict=True):
                if isinstance(old, Tensor):
                    old.copy_(fresh)

    return again


def host_of(value: Any) -> Any:
    """The memory behind a tensor of the device; anything else as it is."""
    return value.host if isinstance(value, CudaTensor) else value


def _wrapped(value: Any) -> Any:
    is_bare = isinstance(value, Tensor) and not isinstance(value, CudaTensor)
    return CudaTensor(value) if is_bare else value


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operator writes, by its schema."""
    found: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += [value] if isinstance(value, Tensor) else list(value or ())
    return found


def _extents(operands: Any, written: list[Tensor]) -> Iterable[Extent]:
    """Of the device's memory, and of pinned memory that a copy reads or writes."""
    for tensor in tree_flatten(operands)[0]:
        if isinstance(tensor, Tensor) and device().ordering.knows(tensor):
            is_write = any(tensor is other for other in written)
            if (extent := extent_of(tensor, is_write=is_write)) is not None:
                yield extent


def _results(out: Any, written: list[Tensor]) -> Iterable[Extent]:
    """New tensors are tracked before they are written."""
    for tensor in tree_flatten(out)[0]:
        if isinstance(tensor, Tensor) and not any(tensor is other for other in written):
            device().ordering.track(tensor)
            if (extent := extent_of(tensor, is_write=True)) is not None:
                yield extent


def _poison(out: Any) -> None:
    """Memory of the device begins with what no test can take for a result."""
    if isinstance(out, Tensor) and out.numel():
        out.view(torch.uint8).fill_(0xFF) if out.is_floating_point() else out.fill_(NO_VALUE)
