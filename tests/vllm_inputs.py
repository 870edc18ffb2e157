# SPDX-License-Identifier: Apache-2.0
"""Real vLLM input buffers and block tables on the CPU, for tests that need no whole engine."""

import inspect

import numpy as np
import torch
import vllm.v1.worker.cpu.shm  # noqa: F401  (replaces pinned memory by plain memory, as the CPU worker does)
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBuffers

from tests.cases import full_tables, geometry_of
from tests.oracle import Case
from vllm_ascend.draft_window.inputs import WindowedInputs

CPU = torch.device("cpu")


def make_block_tables(block_sizes: tuple[int, ...], columns: tuple[int, ...], max_num_reqs: int) -> BlockTables:
    arguments = dict(
        block_sizes=list(block_sizes),
        max_num_reqs=max_num_reqs,
        max_num_batched_tokens=64,
        max_num_blocks_per_group=list(columns),
        device=CPU,
    )
    if "kernel_block_sizes" in inspect.signature(BlockTables).parameters:
        arguments["kernel_block_sizes"] = list(block_sizes)
    return BlockTables(**arguments)


class Batch:
    """Buffers of one draft with a batch in them, and the windowed tensors bound to these buffers.

    Stands for the speculator too: a build reads its ``input_buffers`` and ``block_tables``.
    """

    def __init__(
        self,
        case: Case,
        seq_lens: np.ndarray,
        *,
        fused: bool,
        max_num_reqs: int = 0,
        seed: int = 0,
        windows: torch.Tensor | None = None,
    ) -> None:
        rows = max(max_num_reqs, len(seq_lens))
        self.case = case
        self.input_buffers = InputBuffers(rows, 64, CPU)
        self.block_tables = make_block_tables(case.block_sizes, case.full_columns, rows)
        for table, ids in zip(self.block_tables.input_block_tables, full_tables(case, rows, seed), strict=True):
            table.copy_(torch.from_numpy(ids))
        self.set_lengths(seq_lens)
        self.windowed = WindowedInputs(
            geometry_of(case),
            self.input_buffers,
            self.block_tables,
            range(len(case.block_sizes)),
            fused=fused,
            windows=windows,
        )

    def set_lengths(self, seq_lens: np.ndarray) -> None:
        self.input_buffers.seq_lens.zero_()
        self.input_buffers.seq_lens[: len(seq_lens)] = torch.from_numpy(seq_lens)

    def set_queries(self, queries: np.ndarray) -> None:
        starts = torch.from_numpy(np.cumsum(queries, dtype=np.int32))
        self.input_buffers.query_start_loc[1 : len(queries) + 1] = starts
        self.input_buffers.query_start_loc[len(queries) + 1 :] = starts[-1]

    def refresh(self, *, num_reqs: int, num_rows: int) -> None:
        self.windowed.refresh(
            num_reqs=num_reqs, num_rows=num_rows, queries=self.case.queries, lookahead=self.case.lookahead
        )
