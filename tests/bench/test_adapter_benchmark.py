# SPDX-License-Identifier: Apache-2.0
"""What the Model Runner V1 shim costs per step, beside the published formula as plain torch operations.

``pytest tests/bench/test_adapter_benchmark.py --benchmark-only`` shows both times; the ratio test interleaves them in
one run, so that a busy machine slows both alike.
"""

import gc
import time
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("vllm")

from tests.parity.published import PublishedWindow
from tests.ut.spec_decode.metadata import make_metadata, make_table
from vllm_ascend.spec_decode.sliding_window import SlidingWindowAdapter

CPU = torch.device("cpu")
# window, block size, look-ahead, requests
SHAPES = [(2048, 128, 3, 16), (2048, 128, 0, 64), (512, 16, 3, 4)]
ADAPTERS = {"shim": SlidingWindowAdapter, "plain": PublishedWindow}


def one_step(adapter_class: type, window: int, size: int, lookahead: int, num_reqs: int) -> Callable[[], None]:
    """A call that windows a fresh batch, with all three host mirrors, as a proposer does once per step."""
    adapter = adapter_class(window, size, num_reqs, lookahead, CPU)
    table = make_table(num_reqs, 32_768 // size)
    metadata = make_metadata(torch.randint(1, 32_000, (num_reqs,)).numpy(), table)
    fresh = dict(vars(metadata))

    def step() -> None:
        vars(metadata).update(fresh, seq_lens=fresh["seq_lens"][:])
        adapter.apply(metadata)

    return step


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_time_of_one_step(benchmark, adapter, shape):
    benchmark(one_step(ADAPTERS[adapter], *shape))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_apply_is_not_slower_than_plain_operations(shape, record_property):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.disable()
    try:
        shim, plain = (one_step(cls, *shape) for cls in ADAPTERS.values())
        # Each round times both, the other one first every second time; the fastest round is the least disturbed.
        rounds = [_seconds(shim, plain, swap=i % 2 == 1) for i in range(200)]
        ratio = min(of_shim for of_shim, _ in rounds) / min(of_plain for _, of_plain in rounds)
    finally:
        gc.enable()
        torch.set_num_threads(threads)
    record_property("ratio", ratio)
    print(f"shim / plain = {ratio:.2f}")
    assert ratio <= 1.0


def _seconds(shim: Callable[[], None], plain: Callable[[], None], *, swap: bool) -> tuple[float, float]:
    seconds = {}
    for call in (plain, shim) if swap else (shim, plain):
        started = time.perf_counter()
        for _ in range(10):
            call()
        seconds[call] = time.perf_counter() - started
    return seconds[shim], seconds[plain]
