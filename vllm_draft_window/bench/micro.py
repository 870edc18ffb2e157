# SPDX-License-Identifier: Apache-2.0
"""What one refresh of the window costs: the fused launch, its plain-torch twin, and the published formula in torch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm_ascend.draft_window.geometry import WindowGeometry
from vllm_ascend.draft_window.inputs import WindowedInputs

_QUERIES = 7
_REPETITIONS = 30
_CALLS_PER_GRAPH = 20
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


class Inputs:
    """Random lengths and full block tables of one case, and their windowed outputs in the three versions."""

    def __init__(self, case: Case, device: str) -> None:
        self.case = case
        full_columns = case.max_model_len // case.block_size
        generator = torch.Generator(device=device).manual_seed(0)
        lengths = torch.randint(
            case.window,
            case.max_model_len - _QUERIES,
            (case.batch,),
            dtype=torch.int32,
            device=device,
            generator=generator,
        )
        if case.batch > 1:
            # One request that the window does not reach.
            lengths[-1] = 100
        self.seq_lens = lengths
        self.tables = [
            torch.randint(1, 1 << 20, (case.batch, full_columns), dtype=torch.int32, device=device, generator=generator)
            for _ in range(case.groups)
        ]
        self.geometry = WindowGeometry(
            window=case.window,
            block_sizes=(case.block_size,) * case.groups,
            full_columns=(full_columns,) * case.groups,
            max_model_len=case.max_model_len,
            max_queries=_QUERIES,
        )
        self.plain = PlainWindow(self)

    def product(self, *, fused: bool) -> WindowedInputs:
        return WindowedInputs(
            self.geometry,
            SimpleNamespace(seq_lens=self.seq_lens),
            SimpleNamespace(input_block_tables=self.tables),
            range(self.case.groups),
            fused=fused,
        )


class PlainWindow:
    """The published formula, operation by operation, lengths once and tables group by group, with a host mirror."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        # Parallel drafters look no further ahead than their own query tokens.
        self._lookahead = 0
        self.seq_lens = torch.zeros_like(inputs.seq_lens)
        self.block_tables = [
            table.new_zeros(table.shape[0], columns)
            for table, columns in zip(inputs.tables, inputs.geometry.columns, strict=True)
        ]
        self._host = inputs.seq_lens.cpu().numpy()
        self._host_out = np.zeros_like(self._host)

    def refresh(self) -> None:
        """Window lengths and tables on the device, and the lengths on the host."""
        self.refresh_device()
        window, block = self._inputs.case.window, self._inputs.case.block_size
        start = np.maximum(self._host + self._lookahead - window, 0) // block * block
        np.subtract(self._host, start, out=self._host_out)

    def refresh_device(self) -> None:
        seq_lens, lookahead = self._inputs.seq_lens, self._lookahead
        window, block = self._inputs.case.window, self._inputs.case.block_size
        # [batch]
        start = ((seq_lens + (lookahead - window)).clamp(min=0) // block) * block
        length = seq_lens - start
        self.seq_lens.copy_(length)
        for full, out in zip(self._inputs.tables, self.block_tables, strict=True):
            # [batch]
            needed = (length + (lookahead + block - 1)) // block
            # [columns]
            column = torch.arange(out.shape[1], dtype=torch.int32, device=out.device)
            # [batch, columns]
            source = column.unsqueeze(0) + (start // block).unsqueeze(1)
            ids = full.gather(1, source.clamp(max=full.shape[1] - 1).long())
            out.copy_(ids.masked_fill_(column.unsqueeze(0) >= needed.unsqueeze(1), 0))


def measure(cases: Sequence[Case], device: str, *, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Check that the versions agree, then time them; microseconds."""
    rows = []
    for case in cases:
        inputs = Inputs(case, device)
        versions = dict(_versions(inputs, fused=device == "cuda"))
        _check_equal(inputs, versions)
        row: dict[str, Any] = {"case": vars(case), "host_us": {}, "device_us": {}}
        for name, (refresh, device_only, _) in versions.items():
            launches = 1 if name == "fused" else case.groups * _OPERATIONS_PER_GROUP
            calls = max(1, _LAUNCHES_IN_FLIGHT // launches)
            row["host_us"][name] = _host_us(refresh, device, calls)
            if device == "cuda":
                row["device_us"][name] = _device_us(device_only)
        rows.append(row)
        say(f"batch {case.batch}, {case.groups} group(s), W={case.window}: host {_rounded(row['host_us'])} us")
    return rows


def _rounded(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}" for name, value in values.items())


Version = tuple[Callable[[], None], Callable[[], None], Any]


def _versions(inputs: Inputs, *, fused: bool) -> Iterator[tuple[str, Version]]:
    """Name to (whole call, its device part, owner of the outputs)."""
    for name, product in (("fused", True), ("twin", False)):
        if product and not fused:
            continue
        window = inputs.product(fused=product)
        refresh = _bound(window, inputs.case.batch)
        yield name, (refresh, refresh, window)
    yield "plain", (inputs.plain.refresh, inputs.plain.refresh_device, inputs.plain)


def _bound(window: WindowedInputs, batch: int) -> Callable[[], None]:
    return lambda: window.refresh(num_reqs=batch, num_rows=batch, queries=_QUERIES)


def _check_equal(inputs: Inputs, versions: dict[str, Version]) -> None:
    """Raise unless every version writes every element, and the same.

    Raises:
        RuntimeError: they differ.
    """
    expected = inputs.plain
    for name in reversed(versions):
        refresh, _, outputs = versions[name]
        # Poisoned, so that an element that nobody writes shows.
        for tensor in (outputs.seq_lens, *outputs.block_tables):
            tensor.fill_(-1)
        refresh()
        pairs = zip((outputs.seq_lens, *outputs.block_tables), (expected.seq_lens, *expected.block_tables), strict=True)
        if not all(torch.equal(got, wanted) for got, wanted in pairs):
            raise RuntimeError(f"{inputs.case}: {name} disagrees with the plain version")


def _host_us(call: Callable[[], None], device: str, calls: int) -> float:
    """Host time of one call, without waiting for the device; median over repetitions."""
    seconds = []
    for i in range(_REPETITIONS + 3):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        if i >= 3:
            seconds.append((time.perf_counter() - begin) / calls)
    return statistics.median(seconds) * 1e6


def _device_us(call: Callable[[], None]) -> float:
    """Device time of one call: many of them in a graph, so that the host does not set the pace."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS_PER_GRAPH):
            call()
    milliseconds = []
    for i in range(_REPETITIONS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 3:
            milliseconds.append(begin.elapsed_time(end) / _CALLS_PER_GRAPH)
    return statistics.median(milliseconds) * 1e3


def print_micro(console: Any, rows: Sequence[dict[str, Any]]) -> None:
    """One line per case: host and device time per refresh, and how much slower the others are than the fused one."""
    from rich.table import Table

    table = Table(title="One refresh of the window, us (full tables of the longest request; each median of 30)")
    names = list(rows[0]["host_us"])
    reference = names[0]
    for title in ("batch", "groups", "W"):
        table.add_column(title, justify="right")
    kinds = [kind for kind in ("host_us", "device_us") if rows[0][kind]]
    for kind in kinds:
        for name in names:
            table.add_column(f"{kind.removesuffix('_us')} {name}", justify="right")
        for name in names[1:]:
            table.add_column(f"{name}/{reference}", justify="right")
    for row in rows:
        case = row["case"]
        cells = [str(case["batch"]), str(case["groups"]), str(case["window"])]
        for kind in kinds:
            cells += [f"{row[kind][name]:.1f}" for name in names]
            cells += [f"{row[kind][name] / row[kind][reference]:.1f}" for name in names[1:]]
        table.add_row(*cells)
    console.print(table)
