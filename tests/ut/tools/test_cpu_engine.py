# SPDX-License-Identifier: Apache-2.0
"""The interpreter's short ways against its own long ones, which its semantics and ``tl.core`` still take."""

import importlib.util
import itertools
import operator

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")

BLOCK = 8
OPERATORS = {
    operator.add: lambda s, a, b: s.add(a, b, False),
    operator.sub: lambda s, a, b: s.sub(a, b, False),
    operator.mul: lambda s, a, b: s.mul(a, b, False),
    operator.mod: lambda s, a, b: s.mod(a, b),
    operator.floordiv: lambda s, a, b: s.floordiv(a, b),
    operator.lt: lambda s, a, b: s.less_than(a, b),
    operator.le: lambda s, a, b: s.less_equal(a, b),
    operator.gt: lambda s, a, b: s.greater_than(a, b),
    operator.ge: lambda s, a, b: s.greater_equal(a, b),
    operator.eq: lambda s, a, b: s.equal(a, b),
    operator.ne: lambda s, a, b: s.not_equal(a, b),
    operator.and_: lambda s, a, b: s.and_(a, b),
    operator.or_: lambda s, a, b: s.or_(a, b),
    operator.xor: lambda s, a, b: s.xor_(a, b),
    operator.lshift: lambda s, a, b: s.shl(a, b),
    operator.rshift: lambda s, a, b: s.ashr(a, b) if a.dtype.is_int_signed() else s.lshr(a, b),
}


@pytest.fixture(scope="module", autouse=True)
def kernels_have_run():
    """Upstream changes the language when the first kernel is launched."""
    import torch
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(pointer, N: tl.constexpr):
        tl.store(pointer + tl.arange(0, N), tl.program_id(0))

    kernel[(1,)](torch.ones(BLOCK, dtype=torch.int32), BLOCK)


def tensors():
    """Scalars and blocks of every type that kernels compute with, and their extremes."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    rng = np.random.default_rng(0)
    for dtype, numpy_type in {
        tl.int1: np.bool_,
        tl.int8: np.int8,
        tl.int32: np.int32,
        tl.int64: np.int64,
        tl.uint32: np.uint32,
        tl.uint64: np.uint64,
        tl.float32: np.float32,
        tl.float64: np.float64,
    }.items():
        if dtype.is_floating():
            block = rng.normal(0, 1e3, BLOCK).astype(numpy_type)
            block[:3] = np.nan, np.inf, -0.0
        elif dtype == tl.int1:
            block = rng.integers(0, 2, BLOCK).astype(bool)
        else:
            limits = np.iinfo(numpy_type)
            block = rng.integers(max(limits.min, -40), 40, BLOCK).astype(numpy_type)
            block[:2] = limits.min, limits.max
            block[block == 0] = 3
        for data in (block, block[2:3]):
            yield tl.tensor(TensorHandle(data, dtype), tl.block_type(dtype, [BLOCK]) if len(data) > 1 else dtype)


def outcome(compute):
    """Bits, numpy's type and Triton's type of a result, or that there is none."""
    try:
        with np.errstate(all="ignore"):
            result = compute()
    except Exception:
        return "refused"
    return result.handle.data.tobytes(), result.handle.data.dtype, str(result.type), str(result.shape)


@pytest.mark.parametrize("compute", OPERATORS, ids=lambda compute: compute.__name__)
def test_operators(compute):
    from triton.runtime.interpreter import interpreter_semantic as semantic

    short = 0
    for a, b in itertools.product(tensors(), [*tensors(), 3, -2, 2**40, 0.1, True]):
        expected = outcome(lambda a=a, b=b: OPERATORS[compute](semantic, a, b))
        assert outcome(lambda a=a, b=b: compute(a, b)) == expected, (a.type, getattr(b, "type", b))
        short += expected != "refused"
    assert short > 50


@pytest.mark.parametrize("compute", [operator.add, operator.sub, operator.mul], ids=lambda compute: compute.__name__)
def test_a_number_may_be_on_the_left(compute):
    from triton.runtime.interpreter import interpreter_semantic as semantic

    for number, tensor in itertools.product([3, -2, 2**40, 0.1], tensors()):
        expected = outcome(lambda n=number, t=tensor: OPERATORS[compute](semantic, n, t))
        assert outcome(lambda n=number, t=tensor: compute(n, t)) == expected, (number, tensor.type)


@pytest.mark.parametrize("numpy_type", [np.int8, np.int32, np.int64, np.float32])
def test_loads_and_stores(numpy_type):
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle
    from triton.runtime.interpreter import interpreter_semantic as semantic

    memory = np.arange(1, BLOCK + 1).astype(numpy_type)
    dtype = {np.int8: tl.int8, np.int32: tl.int32, np.int64: tl.int64, np.float32: tl.float32}[numpy_type]
    pointer_type = tl.pointer_type(dtype)
    base = tl.tensor(TensorHandle(np.array([memory.ctypes.data], np.uint64), pointer_type), pointer_type)
    block, some = base + tl.arange(0, BLOCK), tl.arange(0, BLOCK) < 5
    for pointer in (base, base + 3, block):
        for mask in (None, some, tl.program_id(0) == 0, tl.program_id(0) > 0):
            for other in (None, 0, 7, -1.0):
                expected = outcome(lambda p=pointer, m=mask, o=other: tl.core.load(p, m, o, _semantic=semantic))
                assert outcome(lambda p=pointer, m=mask, o=other: tl.load(p, m, o)) == expected
            for value in (5, 2.5, tl.program_id(0), tl.arange(0, BLOCK)):
                written = []
                for store in (lambda *a: tl.core.store(*a, _semantic=semantic), tl.store):
                    memory[:] = np.arange(1, BLOCK + 1)
                    try:
                        store(pointer, value, mask)
                    except Exception:
                        memory[:] = -1
                    written.append(memory.copy())
                assert np.array_equal(*written)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_random_numbers_are_philox(counter, key, expected):
    """The known answers of Random123, for Philox 4x32 in ten rounds."""
    import triton.language as tl
    from triton.language import random
    from triton.runtime.interpreter import TensorHandle

    words = [
        tl.tensor(TensorHandle(np.array([int(word, 16)], np.uint32), tl.uint32), tl.uint32)
        for word in f"{counter} {key}".split()
    ]
    result = random.philox_impl(*words, n_rounds=10)
    assert [f"{word.handle.data[0]:08x}" for word in result] == expected.split()
