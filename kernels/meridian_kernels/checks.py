"""Checks the arguments of the public functions before anything is measured or stored. Every error is a KernelError that
names the argument and its value.

The checks recognise torch tensors and GPU arrays without importing torch or CuPy, because a caller who passes such an
array has imported its library. All functions are pure.
"""

from __future__ import annotations

import functools
import reprlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from meridian_kernels.errors import KernelError

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Dtypes that are measured directly, and NumPy's default dtype, which is rounded to float32 first.
DTYPES, WIDE = ("float32", "bfloat16", "float16"), "float64"
MAX_END_TOKENS = 4
_INT32_MAX = 2**31 - 1
# Attributes that an array on a GPU must have, unless it is a torch tensor.
_OF_GPU_ARRAYS = ("__cuda_array_interface__", "shape", "dtype")


def is_tensor(array: Any) -> bool:
    """Whether an array is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def is_on_gpu(array: Any) -> bool:
    """Whether a checked array is in a GPU's memory."""
    return bool(array.is_cuda) if is_tensor(array) else not isinstance(array, np.ndarray)


def place_of(array: Any) -> str:
    """Return a description of where a checked array is, for error messages."""
    if isinstance(array, np.ndarray):
        return "a NumPy array"
    return str(array.device) if is_tensor(array) else "an array on a GPU"


def logits(array: Any, shape: Sequence[str]) -> None:
    """Raise KernelError unless the array holds logits that can be measured. shape: names of the dimensions that the
    array must have."""
    if is_tensor(array):
        if array.layout is not sys.modules["torch"].strided or array.is_nested:
            kind = "a nested tensor" if array.is_nested else f"a tensor of layout {array.layout}"
            raise KernelError(f"logits must be dense; got {kind}")
    elif isinstance(array, np.ma.MaskedArray) or not (
        isinstance(array, np.ndarray) or all(hasattr(array, name) for name in _OF_GPU_ARRAYS)
    ):
        raise KernelError(f"logits must be a NumPy, torch or CuPy array; got {type(array).__name__}")
    if not isinstance(array.shape, tuple):
        raise KernelError(f"logits must have a tuple as their shape; got {array.shape!r}")
    if len(array.shape) != len(shape) or array.shape[-1] == 0:
        raise KernelError(f"logits must be [{', '.join(shape)}]; got shape {tuple(array.shape)}")
    if (dtype := dtype_of(array)) not in DTYPES and dtype != WIDE:
        raise KernelError(f"logits must be {', '.join(DTYPES)} or {WIDE}; got {dtype}")


def dtype_of(array: Any) -> str:
    return _name(array.dtype)


@functools.cache
def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def narrowed(array: Any) -> Any:
    """Return checked logits whose memory can be measured directly: in a dtype of DTYPES, to which float64 is rounded,
    and without a pending change of sign, which torch notes in a bit of the tensor."""
    if is_tensor(array):
        array = array.resolve_neg()
    if dtype_of(array) != WIDE:
        return array
    return array.float() if is_tensor(array) else array.astype("float32")


def end_tokens(given: Any, vocab: int | None = None) -> tuple[int, ...]:
    """Return one to four different token ids from one id or a list of ids. vocab: size of the vocabulary, which all ids
    must be below; None if it is unknown."""
    name = "think_end_token_ids"
    if _is_integer(given):
        given = (given,)
    elif isinstance(given, np.ndarray) and given.ndim == 1:
        given = given.tolist()
    elif not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        raise KernelError(f"{name} must be a token id or a list of them; got {reprlib.repr(given)}")
    if not 1 <= len(given) <= MAX_END_TOKENS:
        raise KernelError(f"{name} must be 1 to {MAX_END_TOKENS} token ids; got {len(given)}")
    for token in given:
        if not _is_integer(token):
            raise KernelError(f"{name} must be integers; got {reprlib.repr(token)}")
        if not 0 <= token < (_INT32_MAX if vocab is None else vocab):
            raise KernelError(f"{name} must be in [0, {_INT32_MAX if vocab is None else vocab}); got {token}")
    # CuPy passes a NumPy number to a kernel in the number's own width, which may differ from the parameter's width.
    ends = tuple(map(int, given))
    if len(set(ends)) < len(ends):
        raise KernelError(f"{name} must differ from each other; got {list(ends)}")
    return ends


def row_numbers(given: Any, count: int) -> NDArray[np.int32]:
    """Return the indices of the rows to measure out of `count` rows. The indices may be in any order, repeated or
    empty."""
    if isinstance(given, np.ndarray):
        if given.ndim != 1:
            raise KernelError(f"rows must be a list of numbers; got shape {given.shape}")
        if given.dtype.kind not in "iu":
            raise KernelError(f"rows must be integers; got an array of {given.dtype}")
        listed = given.tolist()
    elif isinstance(given, Sequence) and not isinstance(given, (str, bytes)):
        listed = given
        for row in listed:
            if not _is_integer(row):
                raise KernelError(f"rows must be integers; got {reprlib.repr(row)}")
    else:
        raise KernelError(f"rows must be a list of numbers; got {reprlib.repr(given)}")
    if len(listed) and not (min(listed) >= 0 and max(listed) < count):
        raise KernelError(f"rows must be in [0, {count}); got {min(listed)} to {max(listed)}")
    return np.asarray(listed if len(listed) else (), np.int32)


def columns(given: Any, count: int) -> tuple[int, ...]:
    """Return the indices of one or more different columns out of `count` columns."""
    listed = list(given) if isinstance(given, Sequence) and not isinstance(given, (str, bytes)) else []
    wrong = not all(_is_integer(column) and 0 <= column < count for column in listed)
    if not listed or wrong or len(set(listed)) < len(listed):
        raise KernelError(f"wanted must be different integers in [0, {count}); got {reprlib.repr(given)}")
    return tuple(map(int, listed))


def request_id(name: str, given: Any) -> None:
    if not isinstance(given, str) or not given:
        raise KernelError(f"{name} must be a string that is not empty; got {reprlib.repr(given)}")


def request_ids(given: Any, count: int) -> None:
    """Raise KernelError unless there is one id for each of `count` rows and all ids differ."""
    if not isinstance(given, (list, tuple)):
        raise KernelError(f"req_ids must be a list of strings; got {reprlib.repr(given)}")
    for index, req_id in enumerate(given):
        request_id(f"req_ids[{index}]", req_id)
    if len(given) != count:
        raise KernelError(f"req_ids must name each of the {count} rows of logits_batch; got {len(given)} ids")
    if len(set(given)) < len(given):
        twice = next(req_id for req_id in given if given.count(req_id) > 1)
        raise KernelError(f"req_ids must differ from each other; got {twice!r} more than once")


def flags(name: str, given: Any, count: int) -> list[bool]:
    """Return a flag for each of `count` rows, from one flag for all rows or a list of flags."""
    if isinstance(given, (bool, np.bool_)):
        return [bool(given)] * count
    if isinstance(given, np.ndarray) and given.ndim == 1 and given.dtype == np.bool_:
        given = given.tolist()
    if not isinstance(given, (list, tuple)) or not all(isinstance(flag, (bool, np.bool_)) for flag in given):
        raise KernelError(f"{name} must be a boolean or a list of booleans; got {reprlib.repr(given)}")
    if len(given) != count:
        raise KernelError(f"{name} must have a value for each of the {count} rows; got {len(given)}")
    return list(map(bool, given))


def flag(name: str, given: Any) -> bool:
    if not isinstance(given, (bool, np.bool_)):
        raise KernelError(f"{name} must be true or false; got {reprlib.repr(given)}")
    return bool(given)


def fraction(name: str, given: Any) -> float:
    """Return a number in (0, 1] as a float."""
    is_number = isinstance(given, (int, float, np.integer, np.floating)) and not isinstance(given, bool)
    if not is_number or not 0 < given <= 1:
        raise KernelError(f"{name} must be in (0, 1]; got {reprlib.repr(given)}")
    return float(given)


def whole(name: str, given: Any, low: int) -> int:
    """Return an integer that is at least `low`."""
    if not _is_integer(given) or not low <= given <= _INT32_MAX:
        raise KernelError(f"{name} must be an integer in [{low}, {_INT32_MAX}]; got {reprlib.repr(given)}")
    return int(given)


def _is_integer(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
