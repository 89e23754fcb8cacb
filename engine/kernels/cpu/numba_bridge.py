"""Connects numba to torch's threads: typed loads and stores by address, and one parallel region.

Invariant: a kernel is `void(int64*)`, run once by every thread of torch's OpenMP team; a second team would compete for
cores.
"""

import ctypes
import hashlib
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.ccallback import CFunc
from numba.core.dispatcher import Dispatcher
from numba.core.typing import Signature
from numba.extending import intrinsic

BFLOAT16, FLOAT16, FLOAT32 = 0, 1, 2
KINDS = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16, torch.float32: FLOAT32}

LONG_PRODUCT = 8 << 20
"""From this many multiplications on (0.1 ms and more) a product releases the GIL."""

_ELEMENTS_WORTH_A_TEAM = 32768

_FASTMATH = {"reassoc", "contract", "nsz", "arcp"}
"""No nnan and no ninf: a non-finite value must reach the row's logits."""

KERNEL_SIGNATURE = types.void(types.CPointer(types.int64))

_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_HALF, _FLOAT = ir.HalfType(), ir.FloatType()


def _openmp_library() -> ctypes.CDLL:
    """Return the OpenMP runtime that torch runs on, so that both share one team of threads."""
    return ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libgomp.so.1"))


@cache
def is_available() -> bool:
    """False where torch runs on another OpenMP runtime; the reference backend serves there."""
    try:
        library = _openmp_library()
    except OSError:
        return False
    for name in ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads"):
        address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        llvmlite.binding.add_symbol(f"loraplex_{name}", address)
    return True


_gomp_parallel = types.ExternalFunction(
    "loraplex_GOMP_parallel", types.void(types.intp, types.intp, types.uint32, types.uint32)
)
barrier = types.ExternalFunction("loraplex_GOMP_barrier", types.void())
thread_number = types.ExternalFunction("loraplex_omp_get_thread_num", types.int32())
team_size = types.ExternalFunction("loraplex_omp_get_num_threads", types.int32())
"""Return the number of threads; OMP_THREAD_LIMIT and OMP_DYNAMIC may allow fewer than requested."""

Codegen = Callable[[Any, Any, Any, Any], Any]


def _loader(
    element: ir.Type, result: types.Type, widen: Callable[[Any, Any], Any], constant: bool = False
) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def load(typing_context: Any, address: Any, index: Any) -> tuple[Signature, Codegen]:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], element.as_pointer())
            value = builder.load(builder.gep(pointer, [arguments[1]]))
            if constant:
                value.set_metadata("invariant.load", builder.module.add_metadata([]))
            return widen(builder, value)

        return result(types.int64, types.int64), codegen

    return load


def _storer(element: ir.Type, value: types.Type, narrow: Callable[[Any, Any], Any]) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def store(typing_context: Any, address: Any, index: Any, number: Any) -> tuple[Signature, Codegen]:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], element.as_pointer())
            builder.store(narrow(builder, arguments[2]), builder.gep(pointer, [arguments[1]]))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, value), codegen

    return store


def _widen_bfloat16(builder: Any, bits: Any) -> Any:
    return builder.bitcast(builder.shl(builder.zext(bits, _I32), _I32(16)), _FLOAT)


def _narrow_bfloat16(builder: Any, number: Any) -> Any:
    # Round to nearest even. A NaN stays NaN, since the carry could turn it into infinity or zero.
    bits = builder.bitcast(number, _I32)
    odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
    rounded = builder.add(builder.add(bits, _I32(0x7FFF)), odd)
    is_nan = builder.fcmp_unordered("uno", number, number)
    return builder.trunc(builder.lshr(builder.select(is_nan, _I32(0x7FC00000), rounded), _I32(16)), _I16)


_load_bfloat16 = _loader(_I16, types.float32, _widen_bfloat16)
_load_float16 = _loader(_HALF, types.float32, lambda builder, value: builder.fpext(value, _FLOAT))
load_float = _loader(_FLOAT, types.float32, lambda builder, value: value)
load_int = _loader(_I32, types.int32, lambda builder, value: value)
load_long = _loader(_I64, types.int64, lambda builder, value: value)
_load_constant_bfloat16 = _loader(_I16, types.float32, _widen_bfloat16, constant=True)
_load_constant_float16 = _loader(
    _HALF, types.float32, lambda builder, value: builder.fpext(value, _FLOAT), constant=True
)
_load_constant_float = _loader(_FLOAT, types.float32, lambda builder, value: value, constant=True)
_store_bfloat16 = _storer(_I16, types.float32, _narrow_bfloat16)
_store_float16 = _storer(_HALF, types.float32, lambda builder, value: builder.fptrunc(value, _HALF))
store_float = _storer(_FLOAT, types.float32, lambda builder, value: value)


@njit(inline="always")  # type: ignore[untyped-decorator]
def load(kind: int, address: int, index: int) -> Any:
    """Element `index` at `address` as float32; `kind` is a compile-time constant."""
    if kind == 0:
        return _load_bfloat16(address, index)
    if kind == 1:
        return _load_float16(address, index)
    return load_float(address, index)


@njit(inline="always")  # type: ignore[untyped-decorator]
def load_constant(kind: int, address: int, index: int) -> Any:
    """Like `load`, for memory that no thread writes during the region: a loop that stores elsewhere still vectorises."""
    if kind == 0:
        return _load_constant_bfloat16(address, index)
    if kind == 1:
        return _load_constant_float16(address, index)
    return _load_constant_float(address, index)


@njit(inline="always")  # type: ignore[untyped-decorator]
def store(kind: int, address: int, index: int, value: Any) -> None:
    """Round `value` to the element type and write it."""
    if kind == 0:
        _store_bfloat16(address, index, value)
    elif kind == 1:
        _store_float16(address, index, value)
    else:
        store_float(address, index, value)


@njit(inline="always")  # type: ignore[untyped-decorator]
def width(kind: int) -> int:
    """Bytes of an element."""
    return 4 if kind == 2 else 2


_EXP_COEFFICIENTS = (1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0)


@intrinsic  # type: ignore[untyped-decorator]
def exp(typing_context: Any, x: Any) -> tuple[Signature, Codegen]:
    """e**x for x <= 0 as straight vector code: 2**n by exponent bits, the fraction by a polynomial of degree 6."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (x,) = arguments
        floor = builder.module.declare_intrinsic("llvm.floor", [_FLOAT])
        clamped = builder.select(builder.fcmp_ordered(">", x, _FLOAT(-87.0)), x, _FLOAT(-87.0))
        scaled = builder.fmul(clamped, _FLOAT(float(np.float32(np.log2(np.e)))))
        whole = builder.call(floor, [builder.fadd(scaled, _FLOAT(0.5))])
        fraction = builder.fmul(builder.fsub(scaled, whole), _FLOAT(float(np.float32(np.log(2)))))
        value = _FLOAT(float(np.float32(_EXP_COEFFICIENTS[0])))
        for coefficient in _EXP_COEFFICIENTS[1:]:
            value = builder.fadd(builder.fmul(value, fraction), _FLOAT(float(np.float32(coefficient))))
        exponent = builder.shl(builder.add(builder.fptosi(whole, _I32), _I32(127)), _I32(23))
        power = builder.fmul(value, builder.bitcast(exponent, _FLOAT))
        # The clamp would swallow a NaN; x * 0 passes it on.
        return builder.fadd(power, builder.fmul(x, _FLOAT(0.0)))

    return types.float32(types.float32), codegen


_LINE_BYTES = 64
"""Distance between counters: a thread that takes from its own share meets no other thread's cache line."""


@intrinsic  # type: ignore[untyped-decorator]
def _take(typing_context: Any, address: Any) -> tuple[Signature, Codegen]:
    """Count the int64 at `address` up and return what it was; every thread gets another number."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], _I64.as_pointer())
        return builder.atomic_rmw("add", pointer, _I64(1), "monotonic")

    return types.int64(types.int64), codegen


@njit(inline="always")  # type: ignore[untyped-decorator]
def next_piece(counters: int, owner: int, begin: int, end: int) -> int:
    """Take the next piece from `begin` to `end`, the share of thread `owner`; -1 when all are taken.

    A thread works through its own share, in order, and then through what the others have left of theirs.
    """
    # Read before it is written, so that threads without work do not take the line from each other.
    counter = counters + (owner + 1) * _LINE_BYTES
    if load_long(counter, 0) >= end - begin:
        return -1
    piece = begin + _take(counter)
    return piece if piece < end else -1


@njit  # type: ignore[untyped-decorator]
def _launch(address: int, arguments: Any, threads: int) -> None:
    # Keep the GIL: a region lasts microseconds, and taking it back could wait for another thread's time slice.
    _gomp_parallel(address, arguments.ctypes.data, np.uint32(threads), np.uint32(0))


@njit(nogil=True)  # type: ignore[untyped-decorator]
def _launch_without_gil(address: int, arguments: Any, threads: int) -> None:
    _gomp_parallel(address, arguments.ctypes.data, np.uint32(threads), np.uint32(0))


def sources_digest(folder: Path) -> str:
    """Hash all modules of `folder`: kernels are assembled from several of them."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(hashlib.sha256(path.name.encode()).digest())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


class _KernelCache(FunctionCache):  # type: ignore[misc]
    """Caches machine code on disk until any module of this folder changes; numba's own cache checks the kernel's module
    alone."""

    def __init__(self, function: Callable[[Any], None]) -> None:
        super().__init__(function)
        stamp = sources_digest(Path(__file__).parent)
        self._cache_file = IndexDataCacheFile(self.cache_path, self._impl.filename_base, stamp)

    def _index_key(self, signature: Any, codegen: Any) -> tuple[Any, ...]:
        # numba's key has the pickle of the enclosed functions, which is another one in every process.
        return signature, codegen.magic_tuple(), enclosed_constants(self._py_func)


def enclosed_constants(function: Any) -> tuple[Any, ...]:
    """Return what a kernel is compiled with besides its source: the values it encloses, and those of enclosed functions."""
    values = (cell.cell_contents for cell in function.__closure__ or ())
    return tuple(
        enclosed_constants(value.py_func) if isinstance(value, Dispatcher) else value for value in values
    )


class ParallelKernel:
    """A compiled kernel that takes `num_arguments` integers. Engines on several threads may share it."""

    def __init__(
        self,
        function: Callable[[Any], None],
        num_arguments: int,
        *,
        as_written: bool = False,
        shares_work: bool = False,
    ) -> None:
        """`as_written`: float operations run exactly as in the source, one by one, whatever code surrounds them.

        `shares_work`: the counters of `next_piece`, all zero, follow the arguments.
        """
        if not is_available():
            raise RuntimeError("compiled kernels need torch's GNU OpenMP runtime")
        # Divisions as in IEEE 754: the check for a zero divisor would keep loops from vectorising.
        options = {"fastmath": not as_written and _FASTMATH, "error_model": "numpy"}
        signature = (KERNEL_SIGNATURE.args, KERNEL_SIGNATURE.return_type)
        self._compiled = cast("Any", CFunc(function, signature, locals={}, options=options))
        self._compiled._cache = _KernelCache(function)
        self._compiled.compile()
        self._num_arguments = num_arguments
        self._shares_work = shares_work

    def __call__(self, threads: int, *arguments: int, releases_gil: bool = False) -> None:
        """Run the kernel on at most `threads` threads of torch's team; the kernel gets their number as `team_size`.

        `releases_gil`: for a region of more than about 0.1 ms that uses only its own thread's buffers.
        """
        if len(arguments) != self._num_arguments:
            raise TypeError(f"the kernel takes {self._num_arguments} arguments, not {len(arguments)}")
        launch = _launch_without_gil if releases_gil else _launch
        if self._shares_work:
            block = np.zeros(self._num_arguments + (threads + 2) * _LINE_BYTES // 8, dtype=np.int64)
            block[: self._num_arguments] = arguments
        else:
            block = np.array(arguments, dtype=np.int64)
        launch(self._compiled.address, block, threads)


def threads_for(elements: int) -> int:
    """Return one thread for work too small to be worth waking the team, else all of torch's."""
    return 1 if elements < _ELEMENTS_WORTH_A_TEAM else torch.get_num_threads()
