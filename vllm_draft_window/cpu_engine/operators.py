# SPDX-License-Identifier: Apache-2.0
"""What kernels do most in Triton's interpreter, straight in numpy and with the same results.

The interpreter takes every addition through twenty calls of a compiler's front end, which check and convert types,
spread scalars over blocks and describe the result anew. Here the usual operands, of one kind and one shape, go to numpy
at once; all others go upstream's way.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import interpreter as memory
from triton.language import random
from triton.runtime import interpreter

_SIGNED = ("int8", "int16", "int32", "int64")
_UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
_INTEGERS = {*_SIGNED, *_UNSIGNED}
_FLOATS = {"fp32", "fp64"}  # numpy knows no bfloat16: the interpreter keeps its bits as integers
_ANY_INT32 = {"int32", "int64", *_FLOATS}  # each holds, or rounds, any number of 32 bits

Shape = tuple[int, ...] | None
"""Of a block; ``None`` for a scalar, which numpy holds as an array of one element."""


def shorten() -> None:
    """Replace tensors' operators, loads, stores, ranges and the random number generator."""
    numbers = _INTEGERS | _FLOATS
    _replace("add", np.add, numbers, reflected=True, otherwise=_advanced)
    _replace("sub", np.subtract, numbers, reflected=True)
    _replace("mul", np.multiply, numbers, reflected=True)
    _replace("mod", np.fmod, _INTEGERS)
    _replace("floordiv", lambda a, b: (a - np.fmod(a, b)) // b, _INTEGERS)
    _replace("lt", np.less, numbers, result=tl.int1)
    _replace("le", np.less_equal, numbers, result=tl.int1)
    _replace("gt", np.greater, numbers, result=tl.int1)
    _replace("ge", np.greater_equal, numbers, result=tl.int1)
    _replace("eq", np.equal, numbers, result=tl.int1)
    _replace("ne", np.not_equal, numbers, result=tl.int1)
    _replace("and", np.bitwise_and, _INTEGERS | {"int1"})
    _replace("or", np.bitwise_or, _INTEGERS | {"int1"})
    _replace("xor", np.bitwise_xor, _INTEGERS | {"int1"})
    _replace("lshift", np.left_shift, _INTEGERS)
    _replace("rshift", np.right_shift, _INTEGERS)
    tl.load, tl.store = _load(tl.load), _store(tl.store)
    tl.arange = functools.cache(functools.partial(tl.arange, _semantic=interpreter.interpreter_semantic))
    random.philox_impl = _philox(random.philox_impl)


_block_types: dict[tuple[str, tuple[int, ...]], tl.block_type] = {}


def _tensor(data: np.ndarray, dtype: tl.dtype, shape: Shape) -> tl.tensor:
    handle = object.__new__(interpreter.TensorHandle)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    if shape is None:
        return tl.tensor(handle, dtype)
    key = dtype.name, shape  # types of pointers cannot be hashed
    if key not in _block_types:
        _block_types[key] = tl.block_type(dtype, list(shape))
    return tl.tensor(handle, _block_types[key])


def _shape(tensor: tl.tensor) -> Shape:
    return None if tensor.type is tensor.dtype else tensor.handle.data.shape


def _fits(shape: Shape, other: Shape) -> bool:
    """Whether numpy broadcasts as the interpreter does: blocks of one shape, or a scalar with anything."""
    return shape is None or other is None or shape == other


def _common_type(a: tl.dtype, b: tl.dtype) -> tl.dtype | None:
    """In which both are computed, where numpy takes the same."""
    if a.name == b.name:
        return a
    for integers in (_SIGNED, _UNSIGNED):
        if a.name in integers and b.name in integers:
            return max(a, b, key=lambda dtype: integers.index(dtype.name))
    return None


def _replace(
    name: str,
    compute: Callable[[Any, Any], Any],
    types: set[str],
    *,
    result: tl.dtype | None = None,
    reflected: bool = False,
    otherwise: Callable[[Callable], Callable] = lambda upstream: upstream,
) -> None:
    """Let operator ``name`` be ``compute`` for operands of ``types``, and ``otherwise`` for others."""

    def shortened(method: str, compute: Callable[[Any, Any], Any]) -> Callable:
        upstream = otherwise(getattr(tl.tensor, method))

        # Where upstream has wrapped a method, it names its semantics.
        def operator(self: tl.tensor, other: Any, _semantic: Any = None) -> tl.tensor:
            if isinstance(other, tl.constexpr):
                other = other.value
            dtype, shape, right = self.dtype, _shape(self), other
            if isinstance(other, tl.tensor):
                dtype, right, of_other = _common_type(dtype, other.dtype), other.handle.data, _shape(other)
                possible = dtype is not None and dtype.name in types and _fits(shape, of_other)
                shape = of_other if shape is None else shape
            else:  # A number takes the tensor's type.
                possible = dtype.name in types and (
                    (type(other) is int and dtype.name in _ANY_INT32 and -(2**31) <= other < 2**31)
                    or (type(other) is float and dtype.name in _FLOATS)
                )
            if not possible:
                return upstream(self, other, _semantic=interpreter.interpreter_semantic)
            return _tensor(compute(self.handle.data, right), result or dtype, shape)

        return operator

    setattr(tl.tensor, f"__{name}__", shortened(f"__{name}__", compute))
    if reflected:
        setattr(tl.tensor, f"__r{name}__", shortened(f"__r{name}__", lambda a, b: compute(b, a)))


def _advanced(upstream: Callable) -> Callable:
    """Addition of pointers and integers."""

    def add(self: tl.tensor, other: Any, _semantic: Any) -> tl.tensor:
        pointer, offset = self, other
        if isinstance(other, tl.tensor) and other.dtype.is_ptr():
            pointer, offset = other, self
        if not pointer.dtype.is_ptr():
            return upstream(self, other, _semantic=_semantic)
        size, shape = max(1, pointer.dtype.element_ty.primitive_bitwidth // 8), _shape(pointer)
        if type(offset) is int:
            return _tensor(pointer.handle.data + np.uint64(size * offset % 2**64), pointer.dtype, shape)
        if not isinstance(offset, tl.tensor) or offset.dtype.name not in _INTEGERS or not _fits(shape, _shape(offset)):
            return upstream(self, other, _semantic=_semantic)
        data = pointer.handle.data + offset.handle.data.astype(np.uint64) * np.uint64(size)
        return _tensor(data, pointer.dtype, _shape(offset) if shape is None else shape)

    return add


def _element_type(pointer: Any, mask: Any) -> tl.dtype | None:
    """Of what ``pointer`` points at, where a load or store with this mask needs no conversion of either."""
    if not isinstance(pointer, tl.tensor) or not pointer.dtype.is_ptr() or pointer.dtype.element_ty.name == "int1":
        return None
    if mask is not None:
        if not isinstance(mask, tl.tensor) or mask.handle.data.dtype != np.bool_:
            return None
        if _shape(mask) not in (None, _shape(pointer)):
            return None
    return pointer.dtype.element_ty


def _mask(pointer: tl.tensor, mask: tl.tensor | None) -> np.ndarray:
    addresses = pointer.handle.data
    return np.ones(addresses.shape, bool) if mask is None else np.broadcast_to(mask.handle.data, addresses.shape)


def _load(upstream: Callable) -> Callable:
    def load(pointer: Any, mask: Any = None, other: Any = None, _semantic: Any = None, **hints: Any) -> tl.tensor:
        dtype = _element_type(pointer, mask)
        usual = other is None or (mask is not None and type(other) in (int, float) and dtype != tl.bfloat16)
        if dtype is None or not usual:
            return upstream(pointer, mask, other, **hints, _semantic=interpreter.interpreter_semantic)
        addresses, numpy_type = pointer.handle.data, interpreter._get_np_dtype(dtype)
        default = np.full(addresses.shape, other or 0).astype(numpy_type)
        return _tensor(memory.load(addresses, _mask(pointer, mask), default, numpy_type), dtype, _shape(pointer))

    return load


def _store(upstream: Callable) -> Callable:
    def store(pointer: Any, value: Any, mask: Any = None, _semantic: Any = None, **hints: Any) -> None:
        dtype = _element_type(pointer, mask)
        semantic = interpreter.interpreter_semantic
        if dtype is not None:
            value = semantic.cast(semantic.to_tensor(value), dtype)
        if dtype is None or pointer.dtype.is_const() or _shape(value) not in (None, _shape(pointer)):
            return upstream(pointer, value, mask, **hints, _semantic=semantic)
        addresses = pointer.handle.data
        memory.store(addresses, np.broadcast_to(value.handle.data, addresses.shape), _mask(pointer, mask))

    return store


def _philox(upstream: Callable) -> Callable:
    """The counter-based generator of ``tl.rand``: a hundred operations, whatever the temperature."""

    def philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any, n_rounds: Any) -> tuple[tl.tensor, ...]:
        if c0.dtype != tl.uint32:
            return upstream(c0, c1, c2, c3, k0, k1, n_rounds)
        shape, low, high = _shape(c0), np.uint64(2**32 - 1), np.uint64(32)
        x0, x1, x2, x3, key0, key1 = (t.handle.data.astype(np.uint64) for t in (c0, c1, c2, c3, k0, k1))
        for _ in range(getattr(n_rounds, "value", n_rounds)):
            a, b = np.uint64(0xD2511F53) * x0, np.uint64(0xCD9E8D57) * x2
            x0, x1, x2, x3 = (b >> high) ^ x1 ^ key0, b & low, (a >> high) ^ x3 ^ key1, a & low
            key0, key1 = (key0 + np.uint64(0x9E3779B9)) & low, (key1 + np.uint64(0xBB67AE85)) & low
        return tuple(_tensor(x.astype(np.uint32), tl.uint32, shape) for x in (x0, x1, x2, x3))

    return philox
