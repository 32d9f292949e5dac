"""Measures rows of float32 logits in the CPU's memory with one call of compiled code.

Importing this module imports numba, which every vLLM brings, and compiles the code for this CPU. That takes seconds,
but less once numba has the machine code in its cache. No other module of the package needs numba.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from llvmlite.binding import ffi
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

from meridian_kernels import checks, cpu
from meridian_kernels.definition import COLUMNS, FLOATS

if TYPE_CHECKING:
    from numpy.typing import NDArray

# An engine that starts on a CPU looks for an entry in the instance dictionary of everything that any module holds.
# llvmlite's library takes every unknown name for a function of LLVM, even `__dict__`, and the engine would fail.
if not isinstance(vars(ffi.lib), dict):
    ffi.lib._fntab["__dict__"] = {}

# Sums may be reordered, so that many logits are added at once. NaN and infinities keep their meaning.
_FAST = {"reassoc", "contract", "nsz", "arcp"}
# Number of logits whose sums are taken in float32, before they are added to sums in float64.
_BLOCK = 2048
# Shifted logits below this value have the weight 0, because smaller weights are not normal numbers in float32.
_FLOOR = np.float32(-87.0)
# e^d = 2^n e^r, with n = d / ln 2 rounded to an integer and |r| <= ln 2 / 2. The first of two parts of ln 2 has few
# bits, so that its product with n is exact.
_PER_LN2, _LN2, _LN2_REST = np.float32(1 / math.log(2)), np.float32(355 / 512), np.float32(math.log(2) - 355 / 512)
_HALF, _ONE, _ZERO = np.float32(0.5), np.float32(1.0), np.float32(0.0)
# Coefficients of the series of e^r; the first term left out is below 1.2e-7.
_C2, _C3, _C4, _C5, _C6 = (np.float32(1 / math.factorial(k)) for k in range(2, 7))
# In the bits of a float32: the number of bits of the fraction, the bias of the exponent, the place of the sign, all
# bits but the sign, and infinity.
_FRACTION, _BIAS, _SIGN = np.int32(23), np.int32(127), np.int32(31)
_MAGNITUDE, _INFINITY = np.int32(2**31 - 1), np.int32(0x7F800000)
# The place of -inf in the order of `_order`; that of +inf is its bits.
_LOWEST = np.int32(~0x7F800000)


@intrinsic
def _bits(context: Any, value: Any) -> Any:
    """Return the bits of a float32."""
    return types.int32(types.float32), lambda _, builder, __, values: builder.bitcast(values[0], ir.IntType(32))


@intrinsic
def _float(context: Any, bits: Any) -> Any:
    """Return the float32 with these bits."""
    return types.float32(types.int32), lambda _, builder, __, values: builder.bitcast(values[0], ir.FloatType())


@njit(inline="always")
def _order(bits: Any) -> Any:
    """Return an integer that has the order of the float32 with these bits; from that integer, return the bits."""
    return bits ^ ((bits >> _SIGN) & _MAGNITUDE)


@njit(fastmath=_FAST, inline="always")
def _exp(d: Any) -> Any:
    """Return e^d in float32, for d from _FLOOR to 0."""
    n = np.int32(d * _PER_LN2 - _HALF)
    r = (d - np.float32(n) * _LN2) - np.float32(n) * _LN2_REST
    series = (((((_C6 * r + _C5) * r + _C4) * r + _C3) * r + _C2) * r + _ONE) * r + _ONE
    return series * _float((n + _BIAS) << _FRACTION)


@njit(inline="always")
def _top(row: Any) -> Any:
    """Return the largest logit of a row, or NaN if the row cannot be measured."""
    highest, largest = np.int32(-(2**31)), np.int32(0)
    for i in range(len(row)):
        bits = _bits(row[i])
        highest = max(highest, _order(bits))
        largest = max(largest, bits & _MAGNITUDE)
    # The magnitude of NaN is above that of infinity.
    if largest > _INFINITY or not _LOWEST < highest < _INFINITY:
        return np.float32(np.nan)
    return _float(_order(highest))


@njit(fastmath=_FAST, inline="always")
def _sums(logits: Any, top: Any, end: Any) -> Any:
    """Return the sum of the weights, the sum of the weighted shifted logits, the number of logits above `end`, and the
    index of the first logit that equals `top`, which is large if there is none."""
    total, weighted, above, first = _ZERO, _ZERO, np.int32(0), _MAGNITUDE
    for i in range(len(logits)):
        logit = logits[i]
        shifted = logit - top
        is_low = shifted < _FLOOR
        shifted = _FLOOR if is_low else shifted
        weight = _exp(shifted)
        weight = _ZERO if is_low else weight
        total += weight
        weighted += weight * shifted
        above += np.int32(logit > end)
        first = min(first, np.int32(i) if logit == top else _MAGNITUDE)
    return total, weighted, above, first


_INTEGER, _FLOATS, _INTEGERS = types.int64, types.CPointer(types.float32), types.CPointer(types.int32)
_ROWS, _ENDS = (_FLOATS, _INTEGER, _INTEGER, _INTEGERS, _INTEGER), (_INTEGERS, _INTEGER)
_OUT = (_FLOATS, _INTEGER, _INTEGERS, _INTEGER)
# The code measures the first rows, or the selected rows. The columns of selected rows go one after the other, or to the
# rows' own places.
_FIRST, _GATHERED, _IN_PLACE = range(3)


def _measure(  # noqa: PLR0917
    logits: Any,
    stride: Any,
    vocab: Any,
    selected: Any,
    which: Any,
    ends: Any,
    end_count: Any,
    out: Any,
    places: Any,
    order: Any,
    count: Any,
) -> None:
    """Measure `count` rows. out: the columns [6, places]; order: the index in `out` of each column of RowSignals."""
    columns, tokens, to = carray(out, (6, places)), carray(ends, (end_count,)), carray(order, (6,))
    for j in range(count):
        number = j if which == _FIRST else np.int64(carray(selected, (count,))[j])
        at, place = stride * number, j if which == _GATHERED else number
        row = carray(logits, (at + vocab,))[at:]
        top = _top(row)
        if np.isnan(top):
            for k in range(4):
                columns[to[k], place] = top
            columns[to[4], place], columns[to[5], place] = _float(np.int32(-1)), _ZERO
            continue
        end = row[tokens[0]]
        for k in range(1, end_count):
            end = max(end, row[tokens[k]])
        total, weighted, above, first = 0.0, 0.0, np.int32(1), vocab
        for begin in range(0, vocab, _BLOCK):
            part = _sums(row[begin : begin + _BLOCK], top, end)
            total, weighted, above = total + part[0], weighted + part[1], above + part[2]
            first = min(first, begin + part[3])
        log_total = math.log(total)
        columns[to[0], place] = log_total - weighted / total
        columns[to[1], place] = top + log_total
        columns[to[2], place] = -log_total
        columns[to[3], place] = end - top - log_total
        columns[to[4], place], columns[to[5], place] = _float(np.int32(first)), _float(above)


def _compiled() -> Any:
    """Compile `_measure`, or load its code from numba's cache, which needs a folder that can be written to."""
    decorate = functools.partial(cfunc, types.void(*_ROWS, *_ENDS, *_OUT), fastmath=_FAST)
    try:
        return decorate(cache=True)(_measure)
    except RuntimeError:
        return decorate()(_measure)


_code = _compiled()
_ADDRESS, _NUMBER = ctypes.c_void_p, ctypes.c_int64
# ctypes releases the interpreter's lock during the call.
_call = ctypes.CFUNCTYPE(
    None,
    *(_ADDRESS, _NUMBER, _NUMBER, _ADDRESS, _NUMBER),
    *(_ADDRESS, _NUMBER),
    *(_ADDRESS, _NUMBER, _ADDRESS, _NUMBER),
)(_code.address)


@functools.lru_cache(maxsize=16)
def _token_array(tokens: tuple[int, ...]) -> Any:
    return (ctypes.c_int32 * len(tokens))(*tokens)


_IN_ORDER = _token_array(tuple(range(COLUMNS)))


def _is_plain(logits: Any) -> bool:
    """Whether the code can read checked logits where they are: float32 in a tensor whose rows are contiguous."""
    return checks.is_tensor(logits) and logits.itemsize == 4 and logits.stride(1) == 1 and not logits.is_neg()


class OnePass:
    """Measures rows with the compiled code. An object belongs to one thread, because its buffers are used again.

    Between two steps of a large model the code of everything that Python calls has left the CPU's caches, so a call of
    NumPy takes ten microseconds or more. The class therefore keeps its buffers and their addresses.
    """

    def __init__(self) -> None:
        self._room(64)

    def _room(self, rows: int) -> None:
        self._rows, self._out, self._selected = rows, np.empty(COLUMNS * rows, np.float32), np.empty(rows, np.int32)
        self._out_address, self._selected_address = self._out.ctypes.data, self._selected.ctypes.data

    def measure(self, logits: Any, ends: tuple[int, ...], selected: NDArray[np.int32] | None) -> NDArray[np.float32]:
        """Return the same as `cpu.measure`."""
        count = logits.shape[0] if selected is None else len(selected)
        if count > self._rows:
            self._room(count)
        if _is_plain(logits):
            return self._columns((logits.data_ptr(), logits.stride(0), logits.shape[1]), selected, ends, count)
        columns = np.empty((COLUMNS, count), np.float32)
        for at, near in cpu.chunks(logits, selected):
            vocab = near.shape[1]
            columns[:, at] = self._columns((near.ctypes.data, vocab, vocab), None, ends, len(near))
        return columns

    def repeated(self, logits: Any, ends: tuple[int, ...], wanted: tuple[int, ...]) -> Repeated | None:
        """Return the same as `EntropyProbe.repeated`, for checked arguments in the CPU's memory."""
        return Repeated(logits, ends, wanted) if _is_plain(logits) else None

    def _columns(
        self, rows: tuple[int, int, int], selected: NDArray[np.int32] | None, ends: tuple[int, ...], count: int
    ) -> NDArray[np.float32]:
        """Return the columns [COLUMNS, count] of rows in memory. rows: address of the first row, logits from row to
        row, and logits of a row."""
        which = _FIRST if selected is None else _GATHERED
        if selected is not None:
            self._selected[:count] = selected
        picked, out = (self._selected_address, which), (self._out_address, count, _IN_ORDER, count)
        _call(*rows, *picked, _token_array(ends), len(ends), *out)
        return self._out[: COLUMNS * count].copy().reshape(COLUMNS, count)


class Repeated:
    """Measures logits that come one after another from one computation, such as a model's steps, and returns the bytes
    of some columns.

    Checks are made again only if the selected rows have changed, and little work is done if the number of logits has;
    all other measurements are one call of the compiled code. An object belongs to one thread.
    """

    def __init__(self, logits: Any, ends: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        self._dtype, self._vocab, self._wanted = logits.dtype, logits.shape[1], len(wanted)
        self._ends = _token_array(ends), len(ends)
        rest = [column for column in range(COLUMNS) if column not in wanted]
        self._order = (ctypes.c_int32 * COLUMNS)(*np.argsort([*wanted, *rest]).tolist())
        # The value of each wanted column in a row that is not measured.
        self._blank = np.array([np.nan if column < FLOATS else 0.0 for column in wanted], np.float32)[:, None]
        self._room = 0
        self._shape: Any = None
        self._strides: Any = None
        self._rows: NDArray[np.int32] | None = None

    def measure(self, logits: Any, rows: NDArray[np.int32] | None = None) -> bytes | None:
        """Return the wanted columns of all rows of these logits, one after another; None, and nothing is measured, if
        the logits have another dtype or vocabulary than the first ones, rows that are not contiguous, or a pending
        negation.

        rows: as in `EntropyProbe.begin`, but a different object whenever the rows have changed; a row that is not among
        them has NaN in the columns of floats and 0 in those of integers. Raises KernelError.
        """
        shape, strides = logits.shape, logits.stride()
        if logits.dtype is not self._dtype or shape[1] != self._vocab or strides[1] != 1 or logits.is_neg():
            return None
        if not shape[0]:
            return b""
        if rows is not self._rows or shape != self._shape or strides != self._strides:
            self._prepare(shape, strides, rows)
        _call(logits.data_ptr(), *self._rest)
        return self._bytes.tobytes()

    def _prepare(self, shape: Any, strides: Any, rows: NDArray[np.int32] | None) -> None:
        """Make everything ready that stays the same until the rows or the shape change."""
        # If the check of the rows raises, the next call must not write to the old address.
        self._shape, count = None, shape[0]
        if count > self._room:
            self._room, self._out = count, np.empty(COLUMNS * count, np.float32)
            self._address, self._memory = self._out.ctypes.data, self._out.data.cast("B")
        self._bytes = self._memory[: 4 * self._wanted * count]
        picked: tuple[int | None, int] = (None, _FIRST)
        measured = count
        if rows is not None:
            # A copy, because the caller's array may change, and the code checks nothing.
            self._selected = checks.row_numbers(rows, count)
            self._out[: self._wanted * count].reshape(self._wanted, count)[:] = self._blank
            picked, measured = (self._selected.ctypes.data, _IN_PLACE), len(self._selected)
        self._rest = strides[0], self._vocab, *picked, *self._ends, self._address, count, self._order, measured
        self._shape, self._strides, self._rows = shape, strides, rows
