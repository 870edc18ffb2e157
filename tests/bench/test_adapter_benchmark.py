# SPDX-License-Identifier: Apache-2.0
"""What the Model Runner V1 shim costs per step, beside the published formula as plain torch operations.

``pytest tests/bench/test_adapter_benchmark.py --benchmark-only`` prints both as ratios, measured in one run.
"""

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
def test_one_step(benchmark, adapter, shape):
    """pytest-benchmark prints each group's times as ratios to its fastest."""
    benchmark.group = str(shape)
    benchmark(one_step(ADAPTERS[adapter], *shape))
