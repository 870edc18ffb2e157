# SPDX-License-Identifier: Apache-2.0
"""What one refresh of the window costs: the fused launch, and the same in plain torch operations."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from rich.table import Table

from vllm_ascend.draft_window.bound_launch import bind_on_cuda
from vllm_ascend.draft_window.geometry import WindowGeometry
from vllm_ascend.draft_window.inputs import WindowedInputs
from vllm_draft_window import reporting

_QUERIES = 7
_REPETITIONS = 30
# A call that is measured on the host must not wait for room in the launch queue, which takes about 1,000 launches.
_LAUNCHES_IN_FLIGHT = 400
_OPERATIONS_PER_GROUP = 20


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measured shape; lengths in tokens."""

    batch: int
    groups: int
    window: int
    max_model_len: int
    block_size: int

    def geometry(self) -> WindowGeometry:
        return WindowGeometry(
            window=self.window,
            block_sizes=(self.block_size,) * self.groups,
            full_columns=(self.max_model_len // self.block_size,) * self.groups,
            max_model_len=self.max_model_len,
            max_queries=_QUERIES,
        )

    def inputs(self, device: str) -> tuple[Any, Any]:
        """Random lengths, and a full block table for each group, as a draft and its runner have them."""
        generator = torch.Generator(device=device).manual_seed(0)

        def random(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, dtype=torch.int32, device=device, generator=generator)

        lengths = random(self.window, self.max_model_len - _QUERIES, self.batch)
        if self.batch > 1:
            # One request that the window does not reach.
            lengths[-1] = 100
        tables = [random(1, 1 << 20, self.batch, self.max_model_len // self.block_size) for _ in range(self.groups)]
        offsets = torch.arange(self.batch + 1, dtype=torch.int32, device=device) * _QUERIES
        buffers = SimpleNamespace(seq_lens=lengths, query_start_loc=offsets)
        return buffers, SimpleNamespace(input_block_tables=tables)


def measure(cases: Sequence[Case], device: str, *, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Check that the versions agree, then time them; microseconds.

    Raises:
        RuntimeError: they disagree.
    """
    rows = []
    for case in cases:
        inputs = case.inputs(device)
        row: dict[str, Any] = {"case": asdict(case), "host_us": {}, "device_us": {}}
        written = []
        for name in ("fused", "torch") if device == "cuda" else ("torch",):
            window = WindowedInputs(
                case.geometry(), *inputs, range(case.groups), fused=name == "fused", bind=bind_on_cuda
            )
            refresh = partial(window.refresh, num_reqs=case.batch, num_rows=case.batch, queries=_QUERIES)
            written.append((window.seq_lens, *window.block_tables))
            for tensor in written[-1]:
                tensor.fill_(-1)  # an element that nobody writes shows
            launches = 1 if name == "fused" else case.groups * _OPERATIONS_PER_GROUP
            row["host_us"][name] = _host_us(refresh, device, max(1, _LAUNCHES_IN_FLIGHT // launches))
            if device == "cuda":
                from triton.testing import do_bench_cudagraph

                row["device_us"][name] = do_bench_cudagraph(refresh, return_mode="median") * 1e3
        if not all(map(torch.equal, written[0], written[-1])):
            raise RuntimeError(f"{case}: the fused launch and plain torch disagree")
        rows.append(row)
        host = ", ".join(f"{name} {value:.1f}" for name, value in row["host_us"].items())
        say(f"batch {case.batch}, {case.groups} group(s), W={case.window}: host {host} us")
    return rows


def _host_us(call: Callable[[], None], device: str, calls: int) -> float:
    """Host time of one call, without waiting for the device; median over repetitions."""
    seconds = []
    for _ in range(_REPETITIONS + 3):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        seconds.append((time.perf_counter() - begin) / calls)
    return statistics.median(seconds[3:]) * 1e6


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """One line per case: host and device time per refresh, and how much slower the others are than the first."""
    first, *others = rows[0]["host_us"]
    headings = ["batch", "groups", "W"]
    lines = [[str(row["case"][key]) for key in ("batch", "groups", "window")] for row in rows]
    for kind in (kind for kind in ("host", "device") if rows[0][f"{kind}_us"]):
        headings += [f"{kind} {name}" for name in (first, *others)] + [f"{name}/{first}" for name in others]
        for line, row in zip(lines, rows, strict=True):
            times = row[f"{kind}_us"]
            line += [f"{us:.1f}" for us in times.values()] + [f"{times[n] / times[first]:.1f}" for n in others]
    title = f"One refresh of the window, us (full tables of the longest request; medians of {_REPETITIONS})"
    return reporting.table(headings, lines, title=title, first="left")
