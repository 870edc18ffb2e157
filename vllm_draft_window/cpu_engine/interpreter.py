# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter, made complete for vLLM's kernels and several times faster, with the same results."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime import interpreter

from . import operators


def complete() -> None:
    """Close three gaps: ``log1p`` and integer masks (temperature > 0), and reductions over nothing but NaN."""

    def log1p(x: Any, _semantic: Any = None) -> Any:
        return tl.tensor(interpreter.TensorHandle(np.log1p(x.handle.data), x.handle.dtype), x.type)

    libdevice.log1p = log1p

    # The interpreter's C++ loads and stores take bool masks only, but `mask & int` expressions give integers.
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def with_bool_mask(mask: Any) -> Any:
        return interpreter.TensorHandle(mask.data.astype(np.bool_), mask.dtype)

    builder.create_masked_load = lambda self, ptrs, mask, *rest: load(self, ptrs, with_bool_mask(mask), *rest)
    builder.create_masked_store = lambda self, ptrs, value, mask, *rest: store(
        self, ptrs, value, with_bool_mask(mask), *rest
    )

    # vLLM warms up with attention outputs that nothing has written; where they are NaN, the interpreter's reductions
    # raise, while a device gives some index.
    reduce_index = interpreter.ReduceOps.min_max

    def min_max(self: Any, input: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        data = input.handle.data
        if np.isnan(data).any():
            input = self.to_tensor(np.where(np.isnan(data), -np.inf, data), input.dtype)
        return reduce_index(self, input, val_reduce_op, idx_reduce_op)

    interpreter.ReduceOps.min_max = min_max


def speed_up() -> None:
    """Leave out what the interpreter does again at every launch and operation, to no effect."""
    interpreter._patch_lang = _patch_language_once(interpreter._patch_lang)
    # Overflow is computed as ten more operations for each, and reported in debug mode only.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    # Every operation makes a tensor, of one of a few types and shapes.
    tl.tensor.__init__ = _init_tensor
    numpy_type, address = functools.cache(interpreter._get_np_dtype), np.dtype(np.uint64)
    interpreter._get_np_dtype = lambda ty: address if ty.scalar.is_ptr() else numpy_type(ty.scalar)
    operators.shorten()


@functools.cache
def _shape_and_numel(shape: tuple[int, ...]) -> tuple[tl.tuple, tl.constexpr]:
    return tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shape_and_numel(type.shape if type.is_block() else ())


def _patch_language_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``triton.language`` stays patched: upstream patches it for every call of a kernel or device function."""
    patched: set[frozenset[ModuleType]] = set()
    nothing_to_restore = SimpleNamespace(restore=lambda: None)

    @functools.cache
    def patch_once(fn: Any) -> SimpleNamespace:
        modules = frozenset(m for m in fn.__globals__.values() if inspect.ismodule(m) and m in (tl, tl.core))
        if modules not in patched:
            patch(fn)
            patched.add(modules)
        return nothing_to_restore

    return patch_once
